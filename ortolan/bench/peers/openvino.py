"""OpenVINO GenAI on a GGUF file or a folder of its own format."""

from __future__ import annotations

from importlib import import_module, metadata, util
from pathlib import Path

import numpy as np

from ortolan.bench.cases import Case, Sample
from ortolan.bench.worker import Worker
from ortolan.errors import BenchError

_PACKAGE = "openvino-genai"


class OpenVino:
    """openvino_genai's LLMPipeline on CPU, one row at a time, in a process per thread count.

    It has no call that reads a prompt alone: prefill is the time to the first token, and decode
    the time between tokens, the choice of each included. Raises BenchError if not installed.
    """

    name = "openvino"
    note = "choice of the token included"

    def __init__(self, path: Path) -> None:
        if util.find_spec("openvino_genai") is None:
            raise BenchError(f"--against openvino needs {_PACKAGE}; run: pip install {_PACKAGE}")
        self._path = path
        self._workers: dict[int, Worker] = {}
        self.version = metadata.version(_PACKAGE)

    def supports(self, case: Case) -> bool:
        return case.phase in ("prefill", "decode") and case.batch == 1

    def run(self, case: Case) -> Sample:
        if case.threads not in self._workers:
            self._workers[case.threads] = Worker(_Service, self._path, case.threads)
        found: Sample = self._workers[case.threads].call("run", case)
        return found

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class _Service:
    """Lives in the child."""

    def __init__(self, path: Path, threads: int) -> None:
        genai = import_module("openvino_genai")
        self._ov, self._genai = import_module("openvino"), genai
        self._pipe = genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)
        self._random = np.random.default_rng(0)
        self._warm: set[str] = set()

    def run(self, case: Case) -> Sample:
        if case.name not in self._warm:
            self._once(case)
            self._warm.add(case.name)
        return self._once(case)

    def _once(self, case: Case) -> Sample:
        prompt = case.tokens if case.phase == "prefill" else case.context
        wanted = 1 if case.phase == "prefill" else case.tokens + 1
        # Low ids exist in every vocabulary; what they mean makes no difference to the time.
        ids = self._random.integers(100, 1000, (1, prompt)).astype(np.int64)
        config = self._genai.GenerationConfig(
            max_new_tokens=wanted, ignore_eos=True, do_sample=False
        )
        result = self._pipe.generate(self._ov.Tensor(ids), config)
        # Its own clock, in microseconds: a callback would not see every token.
        raw = result.perf_metrics.raw_metrics
        if case.phase == "prefill":
            return Sample(raw.m_times_to_first_token[0] * 1e-6)
        steps = tuple(us * 1e-6 for us in raw.m_durations)
        if len(steps) != case.tokens:
            raise BenchError(f"OpenVINO made {len(steps)} of {case.tokens} tokens; leave it out")
        return Sample(sum(steps), steps)
