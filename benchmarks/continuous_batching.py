"""Throughput against live requests: continuous batching, static batching, one at a time.

All run the requests of mixed_lengths.json, greedily. Continuous: the engine, with N requests in
it at any time. Static: N start together and the next N only when all are done; rows that have
ended stay in the batch. It is a loop over the engine's own model that reads the prompts first and
neither schedules nor makes text, which is to its advantage. One at a time: N = 1 in the engine.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

from _common import Report, Series, alternated, parser
from _engine import Clock, Lengths, Prompts, add_clock, engine_on, recorded_mix, submit, tokens_of

import ortolan
from ortolan.runtime.engine.chunks import chunk_sizes
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.life import RequestHandle

BOUND = 1.6
BOUND_AT = 16  # live requests
LIVE = (1, 2, 4, 8, 16, 32)


def continuous(
    engine: Engine, prompts: Prompts, mix: list[Lengths], live: int, clock: Clock
) -> float:
    """Output tokens per second with `live` requests in the engine at any time."""
    todo = deque(enumerate(mix))
    running: list[RequestHandle] = []
    tokens = 0
    began_s = clock()
    while todo or running:
        while todo and len(running) < live:
            index, lengths = todo.popleft()
            running.append(submit(engine, prompts.ids(index, lengths.prompt), lengths.output))
        engine.step()
        tokens += sum(tokens_of(handle) for handle in running)
        running = [handle for handle in running if not handle.done]
    seconds = clock() - began_s
    assert tokens == sum(lengths.output for lengths in mix)
    engine.forget_prefixes()  # the next round must read its prompts again
    return tokens / seconds


class StaticBatches:
    """Groups of N through the model of an idle engine."""

    def __init__(self, engine: Engine, chunk: int) -> None:
        self._model = engine._model
        self._chunk = chunk

    def run(self, prompts: Prompts, mix: list[Lengths], live: int, clock: Clock) -> float:
        """Output tokens per second, those of rows that have ended not counted."""
        began_s = clock()
        for start in range(0, len(mix), live):
            group = mix[start : start + live]
            self._group([prompts.ids(start + i, one.prompt) for i, one in enumerate(group)], group)
        return sum(lengths.output for lengths in mix) / (clock() - began_s)

    def _group(self, ids: list[list[int]], group: list[Lengths]) -> None:
        cache = self._model.cache
        last = [self._read(slot, prompt) for slot, prompt in enumerate(ids)]
        lengths = [len(prompt) for prompt in ids]
        for made in range(1, max(one.output for one in group)):
            logits = self._model.decode(0, last, lengths)
            last = logits.argmax(axis=1).tolist()
            lengths = [n + (made < one.output) for n, one in zip(lengths, group, strict=True)]
        for slot, length in enumerate(lengths):
            cache.discard(slot, length + 1)

    def _read(self, slot: int, ids: list[int]) -> int:
        """A prompt into a slot; the first token of the answer."""
        start = 0
        for size in chunk_sizes(len(ids), self._chunk):
            chunk = ids[start : start + size]
            logits = self._model.prefill(slot, [chunk], [start], [[size - 1]])
            start += size
        return int(logits[0, 0].argmax())


def draw(folder: Path, found: dict[str, dict[int, float]]) -> None:
    """The figure, as SVG and PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    live = list(found["continuous"])
    axes.plot(live, list(found["continuous"].values()), "o-", label="continuous batching")
    axes.plot(live, list(found["static"].values()), "s--", label="static batching")
    one = found["continuous"][min(live)]
    axes.axhline(one, color="gray", linestyle=":", label="one at a time")
    axes.set_xscale("log", base=2)
    axes.set_xticks(live, [str(n) for n in live])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("live requests")
    axes.set_ylabel("output tokens per second")
    axes.legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("svg", "png"):
        figure.savefig(folder / f"continuous_batching.{suffix}", dpi=144)


def main() -> int:
    """Interleave all sizes of both kinds, and report output tokens per second."""
    args_parser = parser(__doc__, rounds=3)
    args_parser.add_argument(
        "--per-live", type=int, default=6, help="requests per live one; default: %(default)s"
    )
    args_parser.add_argument(
        "--live", type=int, nargs="+", default=LIVE, help="default: %(default)s"
    )
    args_parser.add_argument("--longest", type=int, help="cut answers to so many tokens")
    args_parser.add_argument("--figure", type=Path, metavar="FOLDER", help="draw it there as well")
    add_clock(args_parser)
    args = args_parser.parse_args()
    report = Report("continuous batching against static batching, a recorded mix of lengths")
    config = ortolan.EngineConfig(threads=args.threads, max_slots=max(args.live), max_context=512)
    engine, tokenizer = engine_on(args.bundle, config, args.clock)
    prompts, mix = Prompts(tokenizer), recorded_mix()
    if args.longest is not None:
        mix = [Lengths(one.prompt, min(one.output, args.longest)) for one in mix]
    static = StaticBatches(engine, config.prefill_chunk)
    continuous(engine, prompts, mix[:8], 4, args.clock)
    # Few live requests are slow, and few suffice to measure them.
    parts = {live: mix[: max(16, args.per_live * live)] for live in args.live}
    rates: dict[str, dict[int, list[float]]] = {
        kind: {live: [] for live in args.live} for kind in ("continuous", "static")
    }
    for turn in range(args.rounds):
        for live in args.live:
            for kind in alternated(("continuous", "static"), turn):
                if kind == "continuous":
                    rate = continuous(engine, prompts, parts[live], live, args.clock)
                else:
                    rate = static.run(prompts, parts[live], live, args.clock)
                rates[kind][live].append(rate)
    for live in args.live:
        # Seconds per token: `speed` compares times.
        ours, theirs = (
            Series(f"{kind}, {live} live", "s/token", [1 / rate for rate in rates[kind][live]])
            for kind in ("continuous", "static")
        )
        report.speed(f"{live} live", ours, theirs, BOUND if live == BOUND_AT else None)
    medians = {
        kind: {
            live: 1 / Series("", "", [1 / r for r in found]).median for live, found in of.items()
        }
        for kind, of in rates.items()
    }
    for kind, of in medians.items():
        cells = ", ".join(f"{live}: {rate:.0f}" for live, rate in of.items())
        report.notes.append(f"output tokens/s, {kind}: {cells}")
    if args.figure is not None:
        draw(args.figure, medians)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
