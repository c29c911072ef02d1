"""Memory of a process that loads a bundle and fills it, beside what the plan said before.

Run as a program: argv[1] is a JSON object with `bundle` and `settings` (fields of EngineConfig,
max_slots, max_context and prefix_cache_mb among them). Prints a JSON object of bytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import ortolan
from ortolan import SamplingParams
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.memory import Memory, process_bytes
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.plan import plan_memory
from ortolan.runtime.providers import find_provider
from ortolan.runtime.text.no_tokenizer import open_tokenizer

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
_WEIGHTS = ("weights.packed", "weights.bin")
_POLL_S = 0.004


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

    def __init__(self) -> None:
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

    def _watch(self) -> None:
        while not self._end.wait(_POLL_S):
            found = held_bytes()
            if sum(found.values()) > self.bytes:
                self.bytes, self.parts = sum(found.values()), found


def prompts(slots: int, tokens: int, vocab_size: int) -> Iterator[list[int]]:
    """Random prompts, which share no beginning and read all of the embedding's table."""
    rng = np.random.default_rng(0)
    for _ in range(slots):
        yield rng.integers(3, vocab_size, tokens).tolist()


def main(bundle: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Plan, load, fill every slot to its end, the prefix cache, and every buffer."""
    opened = Bundle.open(bundle)
    tokenizer = open_tokenizer(opened)
    settings = {"gap_steps": 1000.0, **settings}  # or reading would wait for answers that run
    config = EngineConfig(**settings)
    provider = find_provider(config.provider, ort)
    memory = Memory(64 << 30, "given")
    plan = plan_memory(opened.manifest, config, provider, memory, process_bytes())
    before = held_bytes()
    with Peak() as peak:
        llm = ortolan.load(bundle, **settings)
    loaded = held_bytes()
    vocab_size = min(tokenizer.vocab_size, opened.manifest.model.vocab_size)
    context = config.max_context or opened.manifest.model.max_context
    # Answers long enough that all slots are full at once, after the last prompt was read.
    answer = context // 4
    drawn = SamplingParams(max_tokens=answer, temperature=0.9, ignore_eos=True, logprobs=2)
    full = list(prompts(config.max_slots, context - answer, vocab_size))
    with Peak() as filled:
        llm.generate(full, drawn)
        llm.generate(full[-1], dataclasses.replace(drawn, max_tokens=1, prompt_logprobs=1))
        llm.generate(full[::-1], drawn)
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))))
