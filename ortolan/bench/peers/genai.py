"""onnxruntime-genai on a folder that its own builder made."""

from __future__ import annotations

import json
import time
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.bench.cases import Case, Sample
from ortolan.bench.worker import Worker
from ortolan.errors import BenchError

_PACKAGE = "onnxruntime-genai"


class Genai:
    """onnxruntime-genai in a process for each number of threads.

    Its step draws the likeliest token as well, which ours in a ratio does not. A context is a
    prompt that was read. Raises BenchError if it is not installed.
    """

    name = "genai"
    note = "greedy choice included"

    def __init__(self, folder: Path) -> None:
        if util.find_spec("onnxruntime_genai") is None:
            raise BenchError(f"--against genai needs {_PACKAGE}; run: pip install {_PACKAGE}")
        if not (folder / "genai_config.json").is_file():
            raise BenchError(
                f"{folder} has no genai_config.json; make the folder with: "
                "python -m onnxruntime_genai.models.builder"
            )
        self._folder = folder
        self._workers: dict[int, Worker] = {}
        self.version = metadata.version(_PACKAGE)

    def supports(self, case: Case) -> bool:
        return case.phase in ("prefill", "decode")

    def run(self, case: Case) -> Sample:
        if case.threads not in self._workers:
            self._workers[case.threads] = Worker(_Service, self._folder, case.threads)
        found: Sample = self._workers[case.threads].call("run", case)
        return found

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class _Service:
    """Lives in the child."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._og = og = import_module("onnxruntime_genai")
        config = og.Config(str(folder))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = og.Model(config)
        made = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        self._vocab_size = int(made["model"]["vocab_size"])
        self._random = np.random.default_rng(0)
        self._warm: set[str] = set()

    def run(self, case: Case) -> Sample:
        if case.name not in self._warm:
            self._once(case)
            self._warm.add(case.name)
        return self._once(case)

    def _once(self, case: Case) -> Sample:
        prompt = case.tokens if case.phase == "prefill" else case.context
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(
            max_length=prompt + case.tokens + 1,
            min_length=prompt + case.tokens + 1,  # no end token ends it
            batch_size=case.batch,
            do_sample=False,
        )
        generator: Any = self._og.Generator(self._model, params)
        ids = self._random.integers(0, self._vocab_size, (case.batch, prompt)).astype(np.int32)
        began_ns = time.perf_counter_ns()
        generator.append_tokens(ids)
        if case.phase == "prefill":
            return Sample((time.perf_counter_ns() - began_ns) * 1e-9)
        generator.generate_next_token()  # from the prompt's own logits
        steps = []
        for _ in range(case.tokens):
            began_ns = time.perf_counter_ns()
            generator.generate_next_token()
            steps.append((time.perf_counter_ns() - began_ns) * 1e-9)
        return Sample(sum(steps), tuple(steps))
