"""Figures of a run: batch scaling, context scaling, roofline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.errors import BenchError, UsageError
from ortolan.optional import require

_SUFFIXES = (".png", ".svg")
_STYLES = ("o-", "s--", "^:", "v-.")  # of systems, Ortolan first
Row = Mapping[str, Any]


def targets(path: Path) -> list[Path]:
    """The files that --plot names: one, or both kinds where it has no suffix.

    Raises UsageError for another suffix.
    """
    if path.suffix in _SUFFIXES:
        return [path]
    if path.suffix:
        raise UsageError(f"--plot {path} must end in .png or .svg, or in neither for both")
    return [path.with_suffix(suffix) for suffix in _SUFFIXES]


def check_target(path: Path) -> None:
    """Raises UsageError, before anything is measured, if the figures could not be written."""
    targets(path)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}; make it first")


def draw(found: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw a report (see report.document) into the files that `path` names; returns them."""
    require("matplotlib", "bench", "--plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    batch, context, roofline = figure.subplots(1, 3)
    decodes = [row for row in found["results"] if row["phase"] == "decode"]
    _scaling(batch, decodes, "batch", "context", "rows that decode together")
    _scaling(context, decodes, "context", "batch", "tokens in each row's context")
    _roofline(roofline, found)
    machine = found["machine"]
    figure.suptitle(
        f"{found['bundle']['name']} on {machine['cpu']}, {machine['cores']} cores, "
        f"onnxruntime {found['versions'].get('onnxruntime', '')}, {found['date'][:10]}"
    )
    return save(figure, targets(path))


def save(figure: Any, files: list[Path]) -> list[Path]:
    """Write a figure of matplotlib's to each of the files. Raises BenchError where it cannot."""
    for target in files:
        try:
            figure.savefig(target, dpi=120)
        except OSError as error:
            raise BenchError(f"{target}: cannot be written ({error.strerror})") from error
    return files


def _scaling(axes: Any, rows: Sequence[Row], along: str, other: str, label: str) -> None:
    """Tokens per second along one sweep: colours for values of the other, dashes for systems."""
    lines: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        lines[row["system"], row["threads"], row[other]].append(row)
    kinds = sorted({(row[other], row["threads"]) for row in rows})
    colours = {kind: f"C{index}" for index, kind in enumerate(kinds)}
    styles = dict(zip(dict.fromkeys(row["system"] for row in rows), _STYLES, strict=False))
    many_threads = len({row["threads"] for row in rows}) > 1
    for (system, threads, value), line in lines.items():
        line = sorted(line, key=lambda row: row[along])
        speeds = [row["tokens_per_s"] for row in line]
        # The spread is of times: the longest is the lowest speed.
        slow = [row["time_ms"]["median"] / row["time_ms"]["high"] for row in line]
        fast = [row["time_ms"]["median"] / row["time_ms"]["low"] for row in line]
        below = [speed * (1 - part) for speed, part in zip(speeds, slow, strict=True)]
        above = [speed * (part - 1) for speed, part in zip(speeds, fast, strict=True)]
        name = f"{system}, {other} {value}" + (f", {threads} threads" if many_threads else "")
        axes.errorbar(
            [row[along] for row in line],
            speeds,
            yerr=[below, above],
            fmt=styles[system],
            color=colours[value, threads],
            capsize=3,
            label=name,
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({row[along] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens/s, all rows together")
    axes.set_title(f"decode by {'batch' if along == 'batch' else 'context'}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _roofline(axes: Any, found: Mapping[str, Any]) -> None:
    """Operations per second over operations per byte, below what memory and products allow."""
    rows = [row for row in found["results"] if row["bound"] is not None]
    peaks = found["peaks"][-1]
    rows = [
        row
        for row in rows
        if row["phase"] in ("prefill", "decode") and row["threads"] == peaks["threads"]
    ]
    intensity = {id(row): _flops(row) / row["bound"]["bytes"] for row in rows}
    low, high = min(intensity.values()) / 2, max(intensity.values()) * 4
    along = np.geomspace(low, high, 100)
    bandwidth = peaks["read_bytes_per_s"]
    for name, peak in peaks["flops_per_s"].items():
        roof = np.minimum(along * bandwidth, peak) / 1e9
        axes.plot(along, roof, label=f"{name}, {peak / 1e9:.0f} GFLOP/s")
    markers = {"prefill": "^", "decode": "o"}
    for phase, marker in markers.items():
        chosen = [row for row in rows if row["phase"] == phase]
        axes.scatter(
            [intensity[id(row)] for row in chosen],
            [_rate(row) / 1e9 for row in chosen],
            marker=marker,
            zorder=3,
            color="black",
            label=phase,
        )
        _name_points(axes, chosen, intensity)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"roofline, reads {bandwidth / 1e9:.0f} GB/s, {peaks['threads']} threads")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="lower right")


def _name_points(axes: Any, rows: Sequence[Row], intensity: Mapping[int, float]) -> None:
    name: Callable[[Row], str] = lambda row: (  # noqa: E731  (used once, below)
        f"{row['tokens']}" if row["phase"] == "prefill" else f"{row['batch']} @ {row['context']}"
    )
    ordered = sorted(rows, key=lambda row: intensity[id(row)])
    for index, row in enumerate(ordered):
        axes.annotate(
            name(row),
            (intensity[id(row)], _rate(row) / 1e9),
            textcoords="offset points",
            xytext=(5, -9 if index % 2 else 5),  # neighbours apart
            fontsize="x-small",
        )


def _flops(row: Row) -> float:
    return float(sum(row["bound"]["flops"].values()))


def _rate(row: Row) -> float:
    """Operations per second: of a whole prompt, or of a median step."""
    milliseconds = row["token_ms"]["p50"] if row["token_ms"] else row["time_ms"]["median"]
    return _flops(row) / float(milliseconds) * 1e3
