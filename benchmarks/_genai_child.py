"""The side of onnxruntime-genai, in a process of its own: a line in is a round, a line out is it.

Runs where onnxruntime-genai is installed, which may be another environment than ours: it imports
nothing of ours. Arguments: the model's folder, and the tests as JSON (see `_ours.Tests`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import onnxruntime_genai as og


class Genai:
    """Prefill, one row, many rows; each gives seconds. Generators are made outside the time."""

    def __init__(self, folder: str, tests: dict[str, int]) -> None:
        self._tests = tests
        self._model = og.Model(folder)
        self._random = np.random.default_rng(0)
        with open(f"{folder}/genai_config.json", encoding="utf-8") as file:  # noqa: PTH123
            self._vocab_size = json.load(file)["model"]["vocab_size"]

    def run(self) -> list[float]:
        repeats = range(self._tests["repeats"])
        self._prefill_s()  # not counted, as no side counts its first
        prefill_s = statistics.median(self._prefill_s() for _ in repeats)
        decode_s = statistics.median(self._decode_s(1, 1, self._tests["tokens"]) for _ in repeats)
        rows = self._tests["rows"]
        if not rows:
            return [prefill_s, decode_s, 0.0]
        work = (rows, self._tests["row_prompt"], self._tests["row_tokens"])
        return [prefill_s, decode_s, self._decode_s(*work)]

    def _generator(self, rows: int, tokens: int) -> Any:
        params = og.GeneratorParams(self._model)
        # A smallest length, so that no end token ends a row early.
        params.set_search_options(
            batch_size=rows, do_sample=False, max_length=tokens, min_length=tokens
        )
        return og.Generator(self._model, params)

    def _ids(self, rows: int, tokens: int) -> np.ndarray[Any, Any]:
        return self._random.integers(3, self._vocab_size, (rows, tokens)).astype(np.int32)

    def _prefill_s(self) -> float:
        prompt = self._tests["prompt"]
        generator, ids = self._generator(1, prompt + 2), self._ids(1, prompt)
        began_s = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        return time.perf_counter() - began_s

    def _decode_s(self, rows: int, prompt: int, tokens: int) -> float:
        generator = self._generator(rows, prompt + tokens + 2)
        generator.append_tokens(self._ids(rows, prompt))
        generator.generate_next_token()  # draws from what the prompt left, and computes nothing
        began_s = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        return time.perf_counter() - began_s


def main() -> None:
    """Serve rounds until the input ends."""
    side = Genai(sys.argv[1], json.loads(sys.argv[2]))
    side.run()  # warms up
    print(json.dumps({"version": og.__version__}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(side.run()), flush=True)


if __name__ == "__main__":
    main()
