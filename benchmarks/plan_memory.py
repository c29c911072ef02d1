"""Memory of a process that loads a bundle and fills it, over what `ortolan plan` says before.

Each case is a new process: it plans, builds the packed cache, loads, and fills every slot and the
prefix cache with random tokens. Compared are the plan's total and the most that the process held.
`--hold JSON` is one such process: an object of EngineConfig's fields, max_slots and max_context
among them; it prints an object of bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from _common import Check, Report, Series, parser

import ortolan
from ortolan import SamplingParams
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.memory import Memory, process_bytes
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.plan import plan_memory
from ortolan.runtime.providers import find_provider
from ortolan.runtime.text.no_tokenizer import open_tokenizer

CASES = ((4, 512), (8, 1024))  # slots, context
WITHIN = 0.1
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
_WEIGHTS = ("weights.packed", "weights.bin")
_PACKING_POLL_S, _FILLING_POLL_S = 0.004, 0.05  # looking takes milliseconds of its own


def held_bytes() -> dict[str, int]:
    """Bytes of this process: anonymous ones, of libraries, and of weights files.

    Both sessions map the same file, whose pages count once (PSS). A library's pages count as a
    whole, whoever else has it mapped.
    """
    found = {"anonymous": 0, "libraries": 0, "weights": 0}
    name = ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if mapping := _MAPPING.match(line):
            name = mapping[1]
            continue
        field, _, rest = line.partition(":")
        is_weights = name.endswith(_WEIGHTS)
        if field == "Pss" and is_weights:
            found["weights"] += int(rest.split()[0]) * 1024
        elif field == "Rss" and not is_weights:
            found["libraries"] += int(rest.split()[0]) * 1024
        elif field == "Anonymous" and not is_weights:
            found["anonymous"] += int(rest.split()[0]) * 1024
    found["libraries"] -= found["anonymous"]
    return found


class Peak:
    """The most that `held_bytes` adds up to while this context is open, and its parts."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self.bytes = 0
        self.parts: dict[str, int] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()  # what took less time than a poll is held still

    def _watch(self) -> None:
        while not self._end.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        found = held_bytes()
        if sum(found.values()) > self.bytes:
            self.bytes, self.parts = sum(found.values()), found


def prompts(slots: int, tokens: int, vocab_size: int) -> Iterator[list[int]]:
    """Random prompts, which share no beginning and read all of the embedding's table."""
    rng = np.random.default_rng(0)
    for _ in range(slots):
        yield rng.integers(3, vocab_size, tokens).tolist()


def hold(bundle: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Plan, load, fill every slot to its end, the prefix cache, and every buffer."""
    opened = Bundle.open(bundle)
    tokenizer = open_tokenizer(opened)
    settings = {"gap_steps": 1000.0, **settings}  # or reading would wait for answers that run
    config = EngineConfig(**settings)
    provider = find_provider(config.provider, ort)
    memory = Memory(64 << 30, "given")
    plan = plan_memory(opened.manifest, config, provider, memory, process_bytes())
    before = held_bytes()
    with Peak(_PACKING_POLL_S) as peak:
        llm = ortolan.load(bundle, **settings)
    loaded = held_bytes()
    vocab_size = min(tokenizer.vocab_size, opened.manifest.model.vocab_size)
    context = config.max_context or opened.manifest.model.max_context
    # Answers long enough to run until the last prompt was read: then all slots are full at once.
    answer = context // 8
    drawn = SamplingParams(max_tokens=answer, temperature=0.9, ignore_eos=True, logprobs=2)
    full = list(prompts(config.max_slots, context - answer, vocab_size))
    with Peak(_FILLING_POLL_S) as filled:
        llm.generate(full[-1], dataclasses.replace(drawn, max_tokens=1, prompt_logprobs=1))
        llm.generate(full, drawn)
    return {
        "plan": {part.name: part.bytes for part in plan.parts},
        "total": plan.total,
        "first_load": plan.first_load,
        "packed": next(part.bytes for part in plan.disk if part.name == "packed cache"),
        "before": before,
        "loaded": loaded,
        "filled": filled.parts,
        "peak": peak.parts,
    }


def measure(args: argparse.Namespace, slots: int, context: int) -> dict[str, Any]:
    """What a new process holds, with a packed cache of its own."""
    with tempfile.TemporaryDirectory() as cache_dir:
        settings = {
            "max_slots": slots,
            "max_context": context,
            "prefix_cache_mb": 16,
            "threads": args.threads,
            "cache_dir": cache_dir,
        }
        command = [sys.executable, __file__, str(args.bundle), "--hold", json.dumps(settings)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Measure every case and report."""
    args_parser = parser(__doc__, rounds=1)
    args_parser.add_argument("--hold", type=json.loads, help=argparse.SUPPRESS)
    args = args_parser.parse_args()
    if args.hold:
        print(json.dumps(hold(args.bundle, args.hold)))
        return 0
    report = Report("memory planned over memory used")
    if not Path("/proc/self/smaps").exists():
        report.skipped = "this system has no /proc/self/smaps"
        return report.finish(args.as_json)
    for slots, context in CASES:
        name = f"{slots} slots of {context}"
        found = [measure(args, slots, context) for _ in range(args.rounds)]
        used = Series(
            f"{name}, used", "MiB", [sum(one["filled"].values()) / 2**20 for one in found]
        )
        peak = Series(f"{name}, peak", "MiB", [sum(one["peak"].values()) / 2**20 for one in found])
        report.series += [used, peak]
        ratio = found[0]["total"] / 2**20 / used.median
        report.checks += [
            Check(f"{name}, planned over used", ratio, "x", 1 + WITHIN, at_least=False),
            Check(f"{name}, planned over used", ratio, "x", 1 - WITHIN),
            Check(
                f"{name}, first load over its bound",
                max(peak.values) * 2**20 / found[0]["first_load"],
                "x",
                1.0,
                at_least=False,
            ),
        ]
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
