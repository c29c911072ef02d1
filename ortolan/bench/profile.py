"""Where the time of a call goes: by operator and by kind of layer, from ONNX Runtime's profile."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from ortolan.bench.cases import Case
from ortolan.bench.cost import NOTHING, Call, Cost, Peaks, bound_of, node_cost
from ortolan.bench.graph import Node
from ortolan.bench.measure import FULL_SAMPLING, Bench, OpenModel
from ortolan.errors import BenchError
from ortolan.graphs.contract import DECODE
from ortolan.runtime.engine.chunks import chunk_sizes
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.sampler import Sampler
from ortolan.runtime.engine.sampler_row import SamplerRow
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.params import SamplingParams

_SUFFIX = "_kernel_time"
_UNITS, _WARM_UP = 12, 2
_SAMPLER = "sampler, full settings"


@dataclass(frozen=True)
class NodeTime:
    """One operator in one unit (a decode step, or a whole prompt): mean seconds, bytes moved."""

    name: str
    op: str
    seconds: float
    moved_bytes: float


@dataclass(frozen=True)
class Line:
    """The operators of one name or kind together. limit: what bounds them, memory or compute.

    fraction: the bound's time over the measured one. Where it is small, time goes into calls.
    """

    name: str
    count: int
    seconds: float
    share: float
    limit: str
    fraction: float


@dataclass(frozen=True)
class Profile:
    """unit_s: a step or prompt without profiling; profiled_s: with it, which costs some."""

    case: Case
    unit_s: float
    profiled_s: float
    by_op: tuple[Line, ...]
    by_kind: tuple[Line, ...]


def profile_case(bench: Bench, case: Case, peaks: Peaks) -> Profile:
    """Run the case on sessions that write a profile, and sum it up."""
    plain = sorted(bench.run(case).total_s for _ in range(3))[1]
    steps = case.tokens if case.phase == "decode" else 1
    name = DECODE if case.phase == "decode" else bench.opened.prefill_name
    with tempfile.TemporaryDirectory(prefix="ortolan-profile-") as folder:
        opened, finish = _profiled(bench.opened, name, Path(folder) / "run")
        events = _profiled_events(opened, case, finish)
    calls = _calls(case, bench.opened.config.prefill_chunk)
    times, total_s = parse_profile(events, len(calls), skip=_WARM_UP)
    config = bench.opened.model.config
    costs = {
        node.name: (node, _sum(node_cost(node, config, call) for call in calls))
        for node in bench.nodes[name]
    }
    extra = _sampling_time(bench, case) if case.phase == "decode" else None
    by_op = group(times, costs, peaks, lambda node, time: time.op, extra)
    by_kind = group(times, costs, peaks, lambda node, time: node.kind, extra)
    return Profile(case, plain / steps, total_s, by_op, by_kind)


def parse_profile(
    events: Iterable[Mapping[str, Any]], calls_per_unit: int, *, skip: int
) -> tuple[list[NodeTime], float]:
    """Mean time of every operator per unit, and of a whole unit, in seconds.

    A unit is so many runs of the session after another. The first `skip` units are warm-up; of the
    others the faster half counts, since what disturbs a run makes it slower only.
    Raises BenchError if the profile holds no complete unit after them.
    """
    events = list(events)
    spans_us = (
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"] == "model_run"
    )
    runs = sorted(spans_us)
    units = [runs[i : i + calls_per_unit] for i in range(0, len(runs), calls_per_unit)]
    units = [unit for unit in units[skip:] if len(unit) == calls_per_unit]
    if not units:
        raise BenchError("onnxruntime's profile holds no complete run; try without --profile")

    def lasted_us(unit: list[tuple[int, int]]) -> int:
        return sum(end - start for start, end in unit)

    kept = sorted(units, key=lasted_us)[: (len(units) + 1) // 2]
    spans = [span for unit in kept for span in unit]
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if event["cat"] != "Node" or not event["name"].endswith(_SUFFIX):
            continue
        if not any(start <= event["ts"] <= end for start, end in spans):
            continue
        args = event["args"]
        found = sums[event["name"].removesuffix(_SUFFIX), args["op_name"]]
        found[0] += event["dur"]
        found[1] += float(args.get("activation_size", 0)) + float(args.get("output_size", 0))
    times = [
        NodeTime(name, op, us * 1e-6 / len(kept), moved / len(kept))
        for (name, op), (us, moved) in sums.items()
    ]
    return times, sum(map(lasted_us, kept)) * 1e-6 / len(kept)


_Costs = Mapping[str, tuple[Node, Cost]]


def group(
    times: Sequence[NodeTime],
    costs: _Costs,
    peaks: Peaks,
    key: Callable[[Node, NodeTime], str],
    extra: tuple[str, float] | None = None,
) -> tuple[Line, ...]:
    """Operators summed by `key`, the slowest group first.

    A node without weights is counted by the activations that it reads and writes. extra: sampling,
    as (name, seconds): it is no part of the session.
    """
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    cost: dict[str, Cost] = defaultdict(lambda: NOTHING)
    for taken in times:
        node, counted = costs.get(taken.name, (Node(taken.name, taken.op, "other", -1), NOTHING))
        if not counted.flops:
            counted = replace(counted, bytes=counted.bytes + taken.moved_bytes)
        name = key(node, taken)
        seconds[name] += taken.seconds
        counts[name] += 1
        cost[name] += counted
    if extra is not None:
        op, took_s = extra
        name = key(Node(op, op, "sampling", -1), NodeTime(op, op, took_s, 0.0))
        seconds[name] += took_s
        counts[name] += 1
    total = sum(seconds.values())
    lines = []
    for name, took_s in sorted(seconds.items(), key=lambda item: -item[1]):
        bound = bound_of(cost[name], peaks)
        limit = bound.limit if cost[name] != NOTHING else ""
        fraction = bound.seconds / took_s if took_s else 0.0
        lines.append(Line(name, counts[name], took_s, took_s / total, limit, fraction))
    return tuple(lines)


def _sum(costs: Iterable[Cost]) -> Cost:
    total = NOTHING
    for cost in costs:
        total += cost
    return total


def _calls(case: Case, prefill_chunk: int) -> list[Call]:
    """The calls of one unit of the case."""
    if case.phase == "decode":
        return [Call(case.batch, 1, case.context)]
    calls, past = [], 0
    for chunk in chunk_sizes(case.tokens, prefill_chunk):
        calls.append(Call(1, chunk, past))
        past += chunk
    return calls


def _profiled(opened: OpenModel, name: str, prefix: Path) -> tuple[OpenModel, Callable[[], str]]:
    """The same model with one session that writes a profile, and what ends it."""
    model, path = opened.model, opened.paths[name]
    if not isinstance(model, Model) or path == opened.bundle.graph_path(name):
        raise BenchError(
            "--profile needs the packed form of the graphs, which only the CPU has, and which may "
            "not be writable where it is kept; give --cache-dir"
        )
    options = session_options(opened.provider.session_config)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(prefix)
    session = opened.provider.open_session(ort, str(path), options)
    change = {"decode": session} if name == DECODE else {"prefill": session}
    sessions = replace(model.sessions, **change)
    profiled = Model(model.config, sessions, model.cache, model.row_multiple, pairs=model.pairs)
    return replace(opened, model=profiled), session.end_profiling


def _profiled_events(
    opened: OpenModel, case: Case, finish: Callable[[], str]
) -> list[dict[str, Any]]:
    model = opened.model
    for _ in range(_WARM_UP + _UNITS):
        if case.phase == "decode":
            model.decode(0, [0] * case.batch, [case.context] * case.batch)
            continue
        for call in _calls(case, opened.config.prefill_chunk):
            model.prefill(0, [[0] * call.chunk], [call.past], [[call.chunk - 1]])
    events: list[dict[str, Any]] = json.loads(Path(finish()).read_text(encoding="utf-8"))
    return events


def _sampling_time(bench: Bench, case: Case) -> tuple[str, float]:
    """Seconds that drawing a token for each row takes, with every filter and penalty at work."""
    config, rows = bench.opened.model.config, case.batch
    sampler = Sampler(bench.opened.model.sessions.sample, config.vocab_size)
    params = SamplingParams(**FULL_SAMPLING)
    prompt = list(range(min(case.context, config.vocab_size)))
    states = [SamplerRow(params, prompt, config.vocab_size) for _ in range(rows)]
    logits = np.random.default_rng(2).standard_normal((rows, config.vocab_size), np.float32)
    took = []
    for _ in range(_WARM_UP + _UNITS):
        began_ns = time.perf_counter_ns()
        sampler.sample(logits, states)
        took.append((time.perf_counter_ns() - began_ns) * 1e-9)
    return _SAMPLER, sorted(took[_WARM_UP:])[_UNITS // 2]
