"""`ortolan bench --provider a,b`: the table of a comparison."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan.cli.bench_table import milliseconds, plus_minus, setting_rows
from ortolan.cli.output import note, one_line, visible, write, write_json, write_table
from ortolan.errors import BenchError, UsageError

if TYPE_CHECKING:
    from ortolan.bench.cases import Plan
    from ortolan.bench.run import Progress

Row = dict[str, Any]


def compare_providers(
    bundle: Path,
    plan: Plan,
    providers: Sequence[str],
    environments: Sequence[str],
    against: Sequence[str],
    llama_bin: Path | None,
    output: str,
    plot: Path | None,
    progress: Progress,
) -> None:
    """Measure, print, draw.

    Raises ProviderError for an unknown name, and BenchError at the end if no provider could run.
    """
    from ortolan.bench.compare.environments import named_pythons
    from ortolan.bench.compare.report import as_csv, document
    from ortolan.bench.compare.run import run_comparison
    from ortolan.runtime.providers import load_provider
    from ortolan.runtime.providers.plugin import is_library

    if plan.profile:
        raise UsageError("--profile looks into one provider; give --provider one name")
    if not all(providers) or len(set(providers)) < len(providers):
        raise UsageError("--provider takes different names, separated by commas: cpu,openvino")
    pythons = named_pythons(environments, providers)
    for name in providers:
        # Another environment may have providers that this one has not.
        if name not in pythons and not is_library(name):
            load_provider(name)
    try:
        results = run_comparison(bundle, plan, providers, pythons, against, llama_bin, progress)
    finally:
        progress("")
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = document(results, bundle.absolute().name, when)
    if results.left_out:
        note(f"left out, too long for this bundle: {', '.join(results.left_out)}")
    if plot is not None and found["results"]:
        from ortolan.bench.compare.plot import draw

        for path in draw(found, plot):
            note(f"figure: {path}")
    if output == "json":
        write_json(found)
    elif output == "csv":
        write(as_csv(found))
    else:
        write_comparison(found)
    if not found["results"]:
        raise BenchError("none of the providers could run; the reasons are above")


def write_comparison(found: dict[str, Any]) -> None:
    """Print where each side ran, and what it reached beside the first."""
    rows = setting_rows(found)
    for name, system in found["systems"].items():
        rows.append((name, one_line(_about(system))))
        rows += [("", f"it warned: {one_line(text)}") for text in system.get("warnings", ())]
    write_table(None, rows)
    header = (
        *("phase", "threads", "rows", "context", "tokens", "provider", "tokens/s", "±"),
        *("p50 ms", f"of {found['first'] or 'the first'}", "rounds from", "to"),
    )
    lines = [_line(row) for row in found["results"]]
    lines += [
        ("", "", "", "", "", name, "cannot run", *[""] * 5)
        for name, system in found["systems"].items()
        if system["reason"]
    ]
    write_table(header, lines, numbers=(1, 2, 3, 4, 6, 7, 8, 9, 10, 11))
    for name, system in found["systems"].items():
        if system["reason"]:
            write(f"{visible(name)} cannot run: {one_line(system['reason'])}\n")


def _about(system: dict[str, Any]) -> str:
    if system["reason"]:
        return "cannot run, see below"
    if "note" in system:
        return f"{system['version']} ({system['note']})"
    packages = ", ".join(f"{name} {text}" for name, text in system["onnxruntime"].items())
    place = "host memory" if system["device"] == "cpu" else f"its own memory ({system['device']})"
    return f"{packages or 'onnxruntime'}, KV in {place}, {system['python']}"


def _line(row: Row) -> tuple[str, ...]:
    token, ratio = row["token_ms"], row["ratio"]
    return (
        row["phase"],
        *(str(row[name]) for name in ("threads", "batch", "context", "tokens")),
        row["system"],
        f"{row['tokens_per_s']:.0f}" if row["tokens_per_s"] >= 10 else f"{row['tokens_per_s']:.2f}",
        plus_minus(row["time_ms"]),
        milliseconds(token["p50"] if token else row["time_ms"]["median"]),
        *(f"{ratio[name]:.2f}" if ratio else "" for name in ("median", "low", "high")),
    )
