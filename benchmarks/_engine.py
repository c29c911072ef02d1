"""What the engine's benchmarks share: an engine on a bundle, prompts of real text, requests."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ortolan
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.life import RequestHandle
from ortolan.runtime.engine.opening import open_engine
from ortolan.runtime.text.no_tokenizer import open_tokenizer
from ortolan.runtime.text.tokenizer import Tokenizer

Clock = Callable[[], float]

TRACE = Path(__file__).with_name("mixed_lengths.json")
# Each prompt starts so many tokens after the one before: no two begin alike.
_STRIDE = 37


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request's prompt and of its answer."""

    prompt: int
    output: int


def recorded_mix() -> list[Lengths]:
    """The mix of lengths in mixed_lengths.json, which says how it was made."""
    pairs = json.loads(TRACE.read_text(encoding="utf-8"))["prompt_output"]
    return [Lengths(*pair) for pair in pairs]


def add_clock(made: argparse.ArgumentParser) -> None:
    """The option for a busy machine, as args.clock."""
    made.add_argument(
        "--cpu-time",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        dest="clock",
        help="count this process's processor time, also in the engine; only with --threads 1",
    )


def engine_on(
    bundle_path: Path, config: ortolan.EngineConfig, clock: Clock = time.perf_counter
) -> tuple[Engine, Tokenizer]:
    """An engine as `ortolan.load` makes it, whose steps we take ourselves."""
    if clock is time.process_time and config.threads != 1:
        raise SystemExit("--cpu-time needs --threads 1: waiting threads use processor time, too")
    bundle = Bundle.open(bundle_path)
    tokenizer = open_tokenizer(bundle)
    engine = open_engine(bundle, config, tokenizer)
    engine._clock = engine._prefill._clock = engine._decode._clock = clock
    return engine, tokenizer


class Prompts:
    """Prompts of real text: pieces of the held-out text that comes with Ortolan."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        folder = Path(ortolan.__file__).parent
        texts = [
            (folder / name).read_text(encoding="utf-8")
            for name in ("heldout.txt", "heldout_code.txt", "heldout_scripts.txt")
        ]
        self._ids = tokenizer.encode("\n\n".join(texts))

    def ids(self, index: int, length: int) -> list[int]:
        """The `index`-th prompt: `length` tokens, from the front again where the text ends."""
        start = index * _STRIDE
        return [self._ids[place % len(self._ids)] for place in range(start, start + length)]


def submit(engine: Engine, ids: list[int], output: int) -> RequestHandle:
    """A greedy request for exactly `output` tokens."""
    params = ortolan.SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    return engine.submit(ortolan.Request(ids, params))


def tokens_of(handle: RequestHandle) -> int:
    """Take a request's events; how many tokens they hold."""
    tokens = sum(len(event.token_ids) for event in handle.events)
    handle.events.clear()
    return tokens


def start_all(engine: Engine, handles: list[RequestHandle]) -> None:
    """Steps until every request has its first token."""
    while not all(handle.events for handle in handles):
        engine.step()
    for handle in handles:
        handle.events.clear()


def seconds_of_steps(
    engine: Engine, steps: int, handles: list[RequestHandle], clock: Clock = time.perf_counter
) -> float:
    """Seconds of so many steps, in which each of the requests gets a token."""
    began_s = clock()
    for _ in range(steps):
        engine.step()
    seconds = clock() - began_s
    assert all(tokens_of(handle) == steps for handle in handles)
    return seconds


def finish_all(engine: Engine, handles: list[RequestHandle]) -> None:
    """Cancel what still runs, so that the next round starts from an idle engine."""
    for handle in handles:
        engine.cancel(handle)
    engine.forget_prefixes()
