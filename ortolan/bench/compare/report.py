"""What a comparison found, as a document of plain values and as CSV; see docs/bench.md."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from ortolan.bench.cases import Case, Sample
from ortolan.bench.compare.run import Comparison, Side
from ortolan.bench.machine import describe_machine, describe_versions, load_average
from ortolan.bench.report import describe_bundle, percentiles_ms, spread_of, step_times
from ortolan.bench.stats import Spread, ratio_of_rounds

SCHEMA = "1.0"
Document = dict[str, Any]

CSV_COLUMNS = (
    *("system", "phase", "threads", "batch", "context", "tokens", "tokens_per_s"),
    *("time_ms", "time_ms_low", "time_ms_high", "token_ms_p50", "token_ms_p90", "token_ms_p99"),
    *("ratio", "ratio_low", "ratio_high", "reason"),
)


def document(found: Comparison, bundle_name: str, when: str) -> Document:
    """The comparison as JSON values. when: the date, in ISO form."""
    plan, first = found.plan, found.first
    return {
        "schema_version": SCHEMA,
        "date": when,
        "machine": {
            **describe_machine(),
            "load_average": load_average(),
            "busy_elsewhere_cores": found.busy_elsewhere,
        },
        "versions": describe_versions(),
        "bundle": describe_bundle(found.manifest, bundle_name),
        "settings": {
            "repeat": plan.repeat,
            "steps": plan.steps,
            "warm_up_runs": 1,
            "left_out": found.left_out,
            "engine": {key: value for key, value in plan.engine.items() if key != "provider"},
        },
        "first": first.name if first else None,
        "systems": {side.name: _system(side) for side in found.sides},
        "results": [
            _row(side, case, samples, first)
            for case in found.cases
            for side in found.sides
            if (samples := side.samples.get(case))
        ],
    }


def _system(side: Side) -> Document:
    """Of a provider its environment, of another engine its version and what differs."""
    environment, peer = side.environment, side.peer
    about: Document
    if peer is not None:
        about = {"version": peer.version, "note": peer.note}
    else:
        about = {
            "python": str(environment.python) if environment else None,
            "python_version": environment.version if environment else None,
            "onnxruntime": dict(environment.onnxruntime) if environment else {},
            "ort_name": side.described.get("ort_name"),
            "device": side.described.get("device"),
            "warnings": side.described.get("warnings", []),
        }
    return {**about, "reason": side.reason or None}


def _row(side: Side, case: Case, samples: Sequence[Sample], first: Side | None) -> Document:
    totals = [sample.total_s for sample in samples]
    time_s = Spread.of(totals)
    token_ms = None
    if case.phase == "decode":
        token_ms = percentiles_ms(step_times(samples, case.tokens))
    ratio = None
    # A peer as the first may not know every case.
    if first is not None and (reference := first.samples.get(case)):
        ratio = ratio_of_rounds(totals, [sample.total_s for sample in reference])
    return {
        "system": side.name,
        "phase": case.phase,
        "threads": case.threads,
        "batch": case.batch,
        "context": case.context,
        "tokens": case.tokens,
        "tokens_per_s": case.batch * case.tokens / time_s.median,
        "time_ms": {**spread_of(time_s, 1e3), "samples": [total * 1e3 for total in totals]},
        "token_ms": token_ms,
        "ratio": None if ratio is None else spread_of(ratio, 1.0),
    }


def as_csv(found: Document) -> str:
    """One line per system and case, and one for each system that could not run."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in found["results"]:
        token, ratio, time = row["token_ms"] or {}, row["ratio"] or {}, row["time_ms"]
        flat = {name: row[name] for name in CSV_COLUMNS[:7]}
        flat |= {"time_ms": time["median"], "ratio": ratio.get("median")}
        flat |= {f"time_ms_{end}": time[end] for end in ("low", "high")}
        flat |= {f"ratio_{end}": ratio.get(end) for end in ("low", "high")}
        flat |= {f"token_ms_{name}": token.get(name) for name in ("p50", "p90", "p99")}
        writer.writerow(flat)
    for name, system in found["systems"].items():
        if system["reason"]:
            writer.writerow({"system": name, "reason": system["reason"]})
    return text.getvalue()
