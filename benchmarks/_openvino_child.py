"""The side of OpenVINO GenAI, in a process of its own: a line in is a round, a line out is it.

Runs where openvino-genai is installed, which may be another environment than ours: it imports
nothing of ours. Arguments: a GGUF file, threads, the attention's backend, "wall" or "processor"
time, and the tests as JSON (see `_ours.Tests`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

_MICRO = 1e-6


class OpenVino:
    """Prefill, one row, many rows; each gives seconds.

    It has no call that reads a prompt alone: prefill is the time to the first token, the choice of
    it included, and decode is the time from the first token to the last. Wall time is by its own
    clock; processor time is the process's, of decode the difference of two calls.
    """

    def __init__(
        self, path: str, threads: int, backend: str, clock: str, tests: dict[str, int]
    ) -> None:
        self._tests = tests
        self._run = self._processor_s if clock == "processor" else self._wall_s
        self._pipe = genai.LLMPipeline(
            path, "CPU", INFERENCE_NUM_THREADS=threads, ATTENTION_BACKEND=backend
        )
        self._random = np.random.default_rng(0)

    def run(self) -> list[float]:
        tests = self._tests
        repeats = range(tests["repeats"])
        self._run(1, tests["prompt"], 0)  # not counted, as no side counts its first
        prefill_s = statistics.median(self._run(1, tests["prompt"], 0)[0] for _ in repeats)
        decode_s = statistics.median(self._run(1, 1, tests["tokens"])[1] for _ in repeats)
        if not tests["rows"]:
            return [prefill_s, decode_s, 0.0]
        _, rows_s = self._run(tests["rows"], tests["row_prompt"], tests["row_tokens"])
        return [prefill_s, decode_s, rows_s]

    def _wall_s(self, rows: int, prompt: int, steps: int) -> tuple[float, float]:
        """Seconds to the first token, and of the steps after it."""
        raw = self._generate(rows, prompt, steps).perf_metrics.raw_metrics
        # A step's time is divided among its rows there.
        return raw.m_times_to_first_token[0] * _MICRO, sum(raw.m_durations) * _MICRO

    def _processor_s(self, rows: int, prompt: int, steps: int) -> tuple[float, float]:
        """The same in processor time."""
        began_s = time.process_time()
        self._generate(rows, prompt, 0)
        first_s = time.process_time() - began_s
        if not steps:
            return first_s, 0.0
        began_s = time.process_time()
        self._generate(rows, prompt, steps)
        return first_s, time.process_time() - began_s - first_s

    def _generate(self, rows: int, prompt: int, steps: int) -> Any:
        # Low ids exist in every vocabulary; what they mean makes no difference to the time.
        ids = self._random.integers(100, 1000, (rows, prompt)).astype(np.int64)
        given: Any = openvino.Tensor(ids)
        if rows > 1:
            given = genai.TokenizedInputs(given, openvino.Tensor(np.ones_like(ids)))
        config = genai.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True, do_sample=False)
        result = self._pipe.generate(given, config)
        if [len(tokens) for tokens in result.tokens] != [steps + 1] * rows:
            sys.exit("it made another number of tokens than it was asked for")
        return result


def main() -> None:
    """Serve rounds until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not mix with answers
    path, threads, backend, clock, tests = sys.argv[1:]
    side = OpenVino(path, int(threads), backend, clock, json.loads(tests))
    side.run()  # warms up
    print(json.dumps({"version": genai.__version__}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(side.run()), file=answers, flush=True)


if __name__ == "__main__":
    main()
