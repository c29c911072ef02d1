"""What a peer's benchmark measures, measured on Ortolan: prefill, one row, many rows."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

import ortolan
from ortolan.runtime.params import Request


@dataclass(frozen=True)
class Tests:
    """How much each test does: prefill, decode of one row, and of `rows` rows (0: not done).

    prompt, tokens: of one row; row_prompt, row_tokens: of each of many. repeats: a round.
    """

    prompt: int
    tokens: int
    rows: int
    row_prompt: int
    row_tokens: int
    repeats: int

    @classmethod
    def read(cls, args: argparse.Namespace) -> Tests:
        """From what `add_arguments` added."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def names(self) -> list[str]:
        """What the tests are called, in the order of their seconds."""
        names = [f"prefill {self.prompt}", f"decode {self.tokens}"]
        return [*names, f"{self.rows} rows, {self.row_tokens} steps"] if self.rows else names

    @property
    def context(self) -> int:
        """Positions that a row needs."""
        return max(self.prompt, self.tokens, self.row_prompt + self.row_tokens) + 2


def add_arguments(made: argparse.ArgumentParser) -> None:
    """The options that say how much each test does."""
    for name, default, what in (
        ("--prompt", 400, "tokens"),
        ("--tokens", 64, "tokens"),
        ("--rows", 16, "0 leaves the test out"),
        ("--row-prompt", 32, "tokens of each row"),
        ("--row-tokens", 32, "tokens of each row"),
        ("--repeats", 2, "a round"),
    ):
        made.add_argument(name, type=int, default=default, help=f"{what}; default: %(default)s")


class Ours:
    """The tests on one bundle, warmed up; each gives seconds of `clock`."""

    def __init__(
        self,
        bundle: Path,
        threads: int,
        tests: Tests,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tests = tests
        self._clock = clock
        # Slots of 4,096 tokens, as a chat would have; memory follows the tokens in them.
        most = ortolan.Manifest.read(bundle).model.max_context
        context = min(most, max(4096, tests.context))
        slots = max(tests.rows, 1)
        # No prompt here begins like another, and no peer keeps any for later.
        self.llm = ortolan.load(
            bundle, threads=threads, max_slots=slots, max_context=context, prefix_cache_mb=0
        )
        self._random = np.random.default_rng(0)
        self.run()  # warms up

    def run(self) -> tuple[float, float, float]:
        """Seconds of prefill, of decode, of many rows: medians of the repeats (rows: once).

        A prompt before them is not counted, as it is not by llama-bench, nor by the other sides:
        while a peer ran, the weights left the caches.
        """
        repeats = range(self.tests.repeats)
        self._prefill_s()
        prefill_s = statistics.median(self._prefill_s() for _ in repeats)
        decode_s = statistics.median(self._decode_s() for _ in repeats)
        return prefill_s, decode_s, self._rows_s()

    def _ids(self, count: int) -> list[int]:
        # Random ids, as llama-bench's.
        ids: list[int] = self._random.integers(0, self._vocab_size, count).tolist()
        return ids

    @property
    def _vocab_size(self) -> int:
        return self.llm.manifest.model.vocab_size

    def _prefill_s(self) -> float:
        ids = self._ids(self.tests.prompt)
        began_s = self._clock()
        self.llm.generate([ids], ortolan.SamplingParams(max_tokens=1, temperature=0))
        return self._clock() - began_s

    def _decode_s(self) -> float:
        tokens = self.tests.tokens
        params = ortolan.SamplingParams(max_tokens=tokens + 1, temperature=0, ignore_eos=True)
        events = self.llm.stream([self.llm.tokenizer.bos_id or 0], params)
        next(events)
        began_s = self._clock()
        assert sum(1 for _ in events) == tokens
        return self._clock() - began_s

    def _rows_s(self) -> float:
        """Steps of many rows by the engine, from the first token of the last row on."""
        if self.tests.rows == 0:
            return 0.0
        engine, steps = self.llm._running(), self.tests.row_tokens
        # Prompts are read one after the other, so rows make tokens until the last one has its own.
        params = ortolan.SamplingParams(
            temperature=0, max_tokens=steps + self.tests.rows + 8, ignore_eos=True
        )
        prompts = [self._ids(self.tests.row_prompt) for _ in range(self.tests.rows)]
        handles = [engine.submit(Request(ids, params)) for ids in prompts]
        while not all(handle.events for handle in handles):
            engine.step()
        began_s = self._clock()
        for _ in range(steps):
            engine.step()
        seconds = self._clock() - began_s
        for handle in handles:
            engine.cancel(handle)
        return seconds
