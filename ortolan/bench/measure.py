"""Runs cases in this process: the model's calls, and whole requests through the front door."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_model import DeviceModel
from ortolan.runtime.engine.device_opening import check_fit, open_device_model
from ortolan.runtime.engine.kv_cache import KvCache, element_bytes
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.opening import open_host_model
from ortolan.runtime.engine.packed import packed_graphs
from ortolan.runtime.engine.sessions import open_sessions, prefill_graph
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.params import EngineConfig, SamplingParams
from ortolan.runtime.providers import Provider, configured_provider

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
    """A model on its own KV slots, and the graphs that its sessions run."""

    model: Model | DeviceModel[Any]
    bundle: Bundle
    config: EngineConfig
    paths: dict[str, Path]  # graph name -> file: packed where there is a packed form
    provider: Provider

    @property
    def prefill_name(self) -> str:
        return next(name for name in self.paths if name != DECODE)


def open_model(path: Path, config: EngineConfig, rows: int, capacity: int) -> OpenModel:
    """The bundle's decoder as the engine opens it, with `rows` slots of `capacity` positions.

    Sets the process's thread pool. Kernels take the same time over any finite keys and values, so
    no context has to be read first: host memory is filled with random ones, a device's stays as
    its self-test leaves it.
    """
    bundle = Bundle.open(path)
    use_threads(config.threads)
    provider = configured_provider(config, ort)
    check_fit(provider, bundle.manifest, config)
    packed = packed_graphs(bundle, provider, config.accuracy, config.cache_dir)
    sessions = open_sessions(bundle, provider, config.accuracy, packed)
    names = (DECODE, prefill_graph(provider))
    paths = packed or {name: bundle.graph_path(name) for name in names}
    settings, manifest = replace(config, max_slots=rows), bundle.manifest
    model: Model | DeviceModel[Any]
    if provider.on_host and provider.capabilities.in_place_kv:
        model = open_host_model(manifest, sessions, settings, capacity)
        fill_with_noise(model.cache, manifest.model)
    else:
        model = open_device_model(manifest, sessions, settings, capacity, Device(provider))
    return OpenModel(model, bundle, config, paths, provider)


def fill_with_noise(cache: KvCache, config: ModelConfig) -> None:
    """Random keys and values of ordinary size in every position of every slot."""
    noise = np.random.default_rng(0).standard_normal(config.head_dim * 256, dtype=np.float32)
    if cache.dtype == "int8":
        noise *= 40  # a third of the largest code
    if cache.dtype == "bfloat16":  # the upper half of a float32
        noise = (noise.view(np.uint32) >> 16).astype(np.float32)
    for layer in range(config.num_layers):
        for part in (0, 1):
            rows = cache.rows(layer, part, 0, cache.slots)
            np.copyto(rows.reshape(-1), np.resize(noise, rows.size), casting="unsafe")


class Bench:
    """The cases of one bundle in this process: each `run` is one sample of one case."""

    def __init__(self, path: Path, config: EngineConfig, cases: Sequence[Case]) -> None:
        rows = max((case.batch for case in cases), default=1)
        capacity = max(max((case.needed_context for case in cases), default=2), 2)
        self.opened = open_model(path, config, rows, capacity)
        self._random = np.random.default_rng(1)
        self._llm: Any = None
        if any(case.phase == "generate" for case in cases):
            settings = {**vars(config), "max_slots": 2, "max_context": capacity}
            self._llm = ortolan.load(path, **settings)

    @cached_property
    def nodes(self) -> dict[str, list[Node]]:
        """Of the graphs, to count their work. Needs the onnx package, which runs do not."""
        return {name: read_graph(file) for name, file in self.opened.paths.items()}

    @property
    def _model_config(self) -> ModelConfig:
        return self.opened.model.config

    @property
    def _kv_bytes(self) -> int:
        return element_bytes(self.opened.bundle.manifest.dtypes.kv)

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
            return prefill_cost(nodes, self._model_config, chunks, self._kv_bytes)
        nodes = self.nodes[DECODE]
        sizes = case.batch, case.context, case.tokens
        return decode_cost(nodes, self._model_config, *sizes, self._kv_bytes)

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
