"""Runs cases in this process: the model's calls, and whole requests through the front door."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import ortolan
from ortolan.bench.cases import Case, Sample
from ortolan.bench.clock import session_clock
from ortolan.bench.cost import Cost, decode_cost, prefill_cost
from ortolan.bench.graph import Node, read_graph
from ortolan.graphs.contract import DECODE
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.chunks import chunk_sizes
from ortolan.runtime.engine.kv_cache import KvCache
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.packed import packed_graphs
from ortolan.runtime.engine.sessions import open_sessions, prefill_graph
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.params import EngineConfig, SamplingParams
from ortolan.runtime.providers import configured_provider

# Filters and penalties that people combine; every one of them costs something per token.
FULL_SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "seed": 1,
}


@dataclass(frozen=True)
class OpenModel:
    """A Model on its own KV slots, and the graphs that its sessions run."""

    model: Model
    bundle: Bundle
    config: EngineConfig
    paths: dict[str, Path]  # graph name -> file: packed where there is a packed form

    @property
    def prefill_name(self) -> str:
        return next(name for name in self.paths if name != DECODE)


def open_model(path: Path, config: EngineConfig, rows: int, capacity: int) -> OpenModel:
    """The bundle's decoder with `rows` slots of `capacity` positions, filled with random KV.

    Sets the process's thread pool. Kernels take the same time over any finite keys and values, so
    random ones stand for a context that nobody has to read first.
    """
    bundle = Bundle.open(path)
    use_threads(config.threads)
    provider = configured_provider(config, ort)
    packed = packed_graphs(bundle, provider, config.accuracy, config.cache_dir)
    sessions = open_sessions(bundle, provider, config.accuracy, packed)
    names = (DECODE, prefill_graph(provider))
    paths = packed or {name: bundle.graph_path(name) for name in names}
    min_rows = 2 if config.accuracy == "exact" else 1
    cache = KvCache(bundle.manifest.model, max(rows, min_rows), capacity + capacity % 2)
    fill_with_noise(cache, bundle.manifest.model)
    model = Model(bundle.manifest.model, sessions, cache, min_rows)
    return OpenModel(model, bundle, config, paths)


def fill_with_noise(cache: KvCache, config: ModelConfig) -> None:
    """Random keys and values of ordinary size in every position of every slot."""
    noise = np.random.default_rng(0).standard_normal(config.head_dim * 256, dtype=np.float32)
    for layer in range(config.num_layers):
        for part in (0, 1):
            rows = cache.rows(layer, part, 0, cache.slots)
            np.copyto(rows.reshape(-1), np.resize(noise, rows.size))


class Bench:
    """The cases of one bundle in this process: each `run` is one sample of one case."""

    def __init__(self, path: Path, config: EngineConfig, cases: Sequence[Case]) -> None:
        rows = max((case.batch for case in cases), default=1)
        capacity = max(max((case.needed_context for case in cases), default=2), 2)
        self.opened = open_model(path, config, rows, capacity)
        self.nodes: dict[str, list[Node]] = {
            name: read_graph(file) for name, file in self.opened.paths.items()
        }
        self._random = np.random.default_rng(1)
        self._llm: Any = None
        if any(case.phase == "generate" for case in cases):
            settings = {**vars(config), "max_slots": 2, "max_context": capacity}
            self._llm = ortolan.load(path, **settings)

    @property
    def _model_config(self) -> ModelConfig:
        return self.opened.model.config

    def run(self, case: Case) -> Sample:
        """One sample of the case."""
        if case.phase == "prefill":
            return self._prefill(case)
        return self._decode(case) if case.phase == "decode" else self._generate(case)

    def cost(self, case: Case) -> Cost:
        """What the case costs: a whole prompt of prefill, one step of the others."""
        if case.phase == "prefill":
            chunks = chunk_sizes(case.tokens, self.opened.config.prefill_chunk)
            nodes = self.nodes[self.opened.prefill_name]
            return prefill_cost(nodes, self._model_config, chunks)
        nodes = self.nodes[DECODE]
        return decode_cost(nodes, self._model_config, case.batch, case.context, case.tokens)

    def _prefill(self, case: Case) -> Sample:
        ids = self._ids(case.tokens)
        model, start = self.opened.model, 0
        steps = []
        for size in chunk_sizes(len(ids), self.opened.config.prefill_chunk):
            chunk = ids[start : start + size]
            began_ns = time.perf_counter_ns()
            model.prefill(0, [chunk], [start], [[size - 1]])
            steps.append((time.perf_counter_ns() - began_ns) * 1e-9)
            start += size
        return Sample(sum(steps), tuple(steps))

    def _decode(self, case: Case) -> Sample:
        model = self.opened.model
        steps = []
        for step in range(case.tokens):
            ids = self._ids(case.batch)  # what a token is makes no difference to its time
            lengths = [case.context + step] * case.batch
            began_ns = time.perf_counter_ns()
            model.decode(0, ids, lengths)
            steps.append((time.perf_counter_ns() - began_ns) * 1e-9)
        return Sample(sum(steps), tuple(steps))

    def _generate(self, case: Case) -> Sample:
        settings = FULL_SAMPLING if case.sampling == "full" else {"temperature": 0.0}
        params = SamplingParams(max_tokens=case.tokens, ignore_eos=True, **settings)
        ids = self._ids(case.context)  # new ones: the prefix cache knows none of them
        times_ns = [time.perf_counter_ns()]
        with session_clock() as clock:
            events = self._llm.stream(ids, params)
            next(events)
            times_ns.append(time.perf_counter_ns())
            before = len(clock.runs_s)
            times_ns.extend(time.perf_counter_ns() for _ in events)
        gaps = [(b - a) * 1e-9 for a, b in pairwise(times_ns)]
        session_s = sum(clock.runs_s[before:])
        return Sample(sum(gaps[1:]), tuple(gaps[1:]), ttft_s=gaps[0], session_s=session_s)

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._model_config.vocab_size, count).tolist()
        return ids
