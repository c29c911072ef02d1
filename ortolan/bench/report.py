"""What a run found, as a document of plain values: the form of --output json, and of all others.

Its keys are described in docs/bench.md. A newer minor version may add keys; a newer major may
change them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ortolan.bench.cases import Case, Sample
from ortolan.bench.cost import bound_of
from ortolan.bench.machine import describe_machine, describe_versions, load_average
from ortolan.bench.run import OURS, Results
from ortolan.bench.stats import Spread, percentile, ratio_of_rounds
from ortolan.graphs.manifest import Manifest

if TYPE_CHECKING:
    from ortolan.bench.profile import Line, Profile

SCHEMA = "1.0"
Document = dict[str, Any]

CSV_COLUMNS = (
    *("system", "phase", "sampling", "threads", "batch", "context", "tokens"),
    *("tokens_per_s", "time_ms", "time_ms_low", "time_ms_high"),
    *("token_ms_p50", "token_ms_p90", "token_ms_p99", "ttft_ms", "outside_session"),
    *("bytes", "flops", "bound_ms", "bound_limit", "bound_fraction"),
    *("ratio", "ratio_low", "ratio_high"),
)


def document(results: Results, bundle_name: str, when: str) -> Document:
    """The run as JSON values. when: the date, in ISO form."""
    manifest, plan = results.manifest, results.plan
    rows = [
        _row(results, system, case, samples)
        for case in results.cases
        for system, found in results.samples.items()
        if (samples := found.get(case))
    ]
    return {
        "schema_version": SCHEMA,
        "date": when,
        "machine": {
            **describe_machine(),
            "load_average": load_average(),
            "busy_elsewhere_cores": results.busy_elsewhere,
        },
        "versions": describe_versions(),
        "bundle": describe_bundle(manifest, bundle_name),
        "settings": {
            "repeat": plan.repeat,
            "steps": plan.steps,
            "warm_up_runs": 1,
            "kv_fill": "random",
            "left_out": results.left_out,
            "quick": plan.quick,
            "engine": dict(plan.engine),
        },
        "peers": {
            name: {"version": version, "note": note}
            for name, (version, note) in results.peers.items()
        },
        "peaks": [
            {
                "threads": threads,
                "read_bytes_per_s": peaks.bandwidth,
                "dram_read_bytes_per_s": results.dram_bandwidth[threads],
                "flops_per_s": dict(peaks.flops),
            }
            for threads, peaks in results.peaks.items()
        ],
        "results": rows,
        "profiles": [_profile(profile) for profile in results.profiles],
    }


def describe_bundle(manifest: Manifest, name: str) -> Document:
    """What was measured; `precision` is bytes of weights by role and format."""
    precision: dict[str, int] = {}
    for group in manifest.weights:
        kind = f"{group.role}: {group.precision}"
        precision[kind] = precision.get(kind, 0) + group.bytes
    return {
        "name": name,
        "source": manifest.source.name,
        "weights_sha256": manifest.files["weights.bin"].sha256,
        "architecture": manifest.model.architecture,
        "attention": manifest.attention,
        "max_context": manifest.model.max_context,
        "precision": precision,
    }


def _row(results: Results, system: str, case: Case, samples: Sequence[Sample]) -> Document:
    totals = [sample.total_s for sample in samples]
    time_s = Spread.of(totals)
    # generate's first token is not among its steps.
    steps = case.tokens - 1 if case.phase == "generate" else case.tokens
    step_s = step_times(samples, steps)
    first = [sample.ttft_s for sample in samples if sample.ttft_s is not None]
    outside = [
        1 - sample.session_s / sample.total_s
        for sample in samples
        if sample.session_s is not None and sample.total_s > 0
    ]
    ratio = None
    if system != OURS:
        ours = [sample.total_s for sample in results.samples[OURS][case]]
        ratio = spread_of(ratio_of_rounds(ours, totals), 1.0)
    per_token = case.phase != "prefill"
    unit_s = percentile(step_s, 50) if per_token else time_s.median
    return {
        "system": system,
        "phase": case.phase,
        "sampling": case.sampling or None,
        "threads": case.threads,
        "batch": case.batch,
        "context": case.context,
        "tokens": case.tokens,
        "tokens_per_s": case.batch * steps / time_s.median,
        "time_ms": {**spread_of(time_s, 1e3), "samples": [total * 1e3 for total in totals]},
        "token_ms": percentiles_ms(step_s) if per_token else None,
        "ttft_ms": spread_of(Spread.of(first), 1e3) if first else None,
        "outside_session": Spread.of(outside).median if outside else None,
        "bound": _bound(results, case, unit_s) if system == OURS else None,
        "ratio": ratio,
    }


def step_times(samples: Sequence[Sample], steps: int) -> list[float]:
    """Seconds of all steps of all samples; of samples without, the mean of their `steps`."""
    found = [step for sample in samples for step in sample.steps_s]
    return found or [sample.total_s / steps for sample in samples]


def percentiles_ms(values: Sequence[float]) -> dict[str, float]:
    """Of seconds."""
    return {f"p{percent}": percentile(values, percent) * 1e3 for percent in (50, 90, 99)}


def spread_of(spread: Spread, factor: float) -> dict[str, float]:
    """Median and range as JSON values, in another unit."""
    return {
        "median": spread.median * factor,
        "low": spread.low * factor,
        "high": spread.high * factor,
    }


def _bound(results: Results, case: Case, unit_s: float) -> Document:
    """The bound of a whole prompt or of one step, and the fraction of it that was reached."""
    cost = results.costs[case]
    bound = bound_of(cost, results.peaks[case.threads])
    return {
        "bytes": cost.bytes,
        "flops": dict(cost.flops),
        "memory_ms": bound.memory_s * 1e3,
        "compute_ms": bound.compute_s * 1e3,
        "limit": bound.limit,
        "fraction": bound.seconds / unit_s,
    }


def _profile(profile: Profile) -> Document:
    case = profile.case
    return {
        "phase": case.phase,
        "threads": case.threads,
        "batch": case.batch,
        "context": case.context,
        "tokens": case.tokens,
        "unit_ms": profile.unit_s * 1e3,
        "profiled_ms": profile.profiled_s * 1e3,
        "by_kind": [_line(line) for line in profile.by_kind],
        "by_operator": [_line(line) for line in profile.by_op],
    }


def _line(line: Line) -> Document:
    return {
        "name": line.name,
        "count": line.count,
        "ms": line.seconds * 1e3,
        "share": line.share,
        "limit": line.limit or None,
        "fraction": line.fraction,
    }


def as_csv(found: Document) -> str:
    """One line per system and case; what does not apply is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in found["results"]:
        writer.writerow(_flat(row))
    return text.getvalue()


def _flat(row: Document) -> Document:
    token, bound, ratio = row["token_ms"] or {}, row["bound"] or {}, row["ratio"] or {}
    plain = (name for name in CSV_COLUMNS if not isinstance(row.get(name), dict))
    flat = {name: row[name] for name in plain if name in row}
    flat |= {
        "time_ms": row["time_ms"]["median"],
        "time_ms_low": row["time_ms"]["low"],
        "time_ms_high": row["time_ms"]["high"],
        "token_ms_p50": token.get("p50"),
        "token_ms_p90": token.get("p90"),
        "token_ms_p99": token.get("p99"),
        "ttft_ms": (row["ttft_ms"] or {}).get("median"),
        "bytes": bound.get("bytes"),
        "flops": sum(bound["flops"].values()) if bound else None,
        "bound_ms": max(bound["memory_ms"], bound["compute_ms"]) if bound else None,
        "bound_limit": bound.get("limit"),
        "bound_fraction": bound.get("fraction"),
        "ratio": ratio.get("median"),
        "ratio_low": ratio.get("low"),
        "ratio_high": ratio.get("high"),
    }
    return flat
