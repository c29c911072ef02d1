"""The figure of a comparison: tokens per second of each provider, prefill and decode apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortolan.bench.plot import save, targets
from ortolan.optional import require

# Bars that differ by more than this are told apart on a logarithmic axis only.
_LOG_FROM = 30.0
Row = Mapping[str, Any]


def draw(found: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw a comparison (see report.document) into the files that `path` names; returns them."""
    require("matplotlib", "bench", "--plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    prefill, decode = figure.subplots(1, 2)
    rows = found["results"]
    systems = [name for name, system in found["systems"].items() if not system["reason"]]
    many_threads = len({row["threads"] for row in rows}) > 1
    for axes, phase in ((prefill, "prefill"), (decode, "decode")):
        _bars(axes, [row for row in rows if row["phase"] == phase], systems, many_threads)
        axes.set_title(phase)
    machine = found["machine"]
    lost = [name for name, system in found["systems"].items() if system["reason"]]
    figure.suptitle(
        f"{found['bundle']['name']} on {machine['cpu']}, {machine['cores']} cores, "
        f"{found['date'][:10]}" + (f"; could not run: {', '.join(lost)}" if lost else "")
    )
    return save(figure, targets(path))


def _bars(axes: Any, rows: Sequence[Row], systems: Sequence[str], many_threads: bool) -> None:
    """A group of bars for each case, a bar for each system, with its ratio to the first on top."""
    cases = list(dict.fromkeys(_case(row, many_threads) for row in rows))
    width = 0.8 / max(len(systems), 1)
    for place, system in enumerate(systems):
        own = [row for row in rows if row["system"] == system]
        at = [cases.index(_case(row, many_threads)) + (place + 0.5) * width - 0.4 for row in own]
        speeds = [row["tokens_per_s"] for row in own]
        # The spread is of times: the longest is the lowest speed.
        slow, fast = (
            [row["time_ms"]["median"] / row["time_ms"][end] for row in own]
            for end in ("high", "low")
        )
        below = [speed * (1 - part) for speed, part in zip(speeds, slow, strict=True)]
        above = [speed * (part - 1) for speed, part in zip(speeds, fast, strict=True)]
        bars = axes.bar(at, speeds, width, yerr=[below, above], capsize=3, label=system)
        ratios = [f"{row['ratio']['median']:.2f}" if row["ratio"] else "" for row in own]
        if place:
            axes.bar_label(bars, ratios, fontsize="x-small", padding=3)
    speeds = [row["tokens_per_s"] for row in rows]
    if speeds and max(speeds) > _LOG_FROM * min(speeds):
        axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), cases, fontsize="small")
    axes.set_ylabel("tokens/s, all rows together")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if speeds:
        axes.legend(fontsize="small")


def _case(row: Row, many_threads: bool) -> str:
    threads = f"\n{row['threads']} threads" if many_threads else ""
    if row["phase"] == "prefill":
        return f"{row['tokens']} tokens{threads}"
    rows = "1 row" if row["batch"] == 1 else f"{row['batch']} rows"
    return f"{rows}\nat {row['context']}{threads}"
