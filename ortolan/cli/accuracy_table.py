"""Accuracy reports as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortolan.cli.output import note, write_table

if TYPE_CHECKING:
    from ortolan.graphs.manifest import AccuracyReport, Manifest


def write_accuracy(manifest: Manifest) -> None:
    """Print a bundle's reports, or why it has none, and warn of weights rounded a second time."""
    for report in manifest.accuracy_reports:
        write_report(report)
    if manifest.no_report is not None:
        note(f"no accuracy report: {manifest.no_report}")
    if twice := [name for name in manifest.rounded_from if name.startswith("int")]:
        cost = "what that costs was not measured"
        if manifest.accuracy_reports:
            total = max((r.total for r in manifest.accuracy_reports), key=lambda t: t.mean_kl)
            cost = (
                f"mean KL is {total.mean_kl:.2g}, the likeliest token the same for "
                f"{total.top1_agreement:.1%}"
            )
        note(
            f"warning: weights that were quantized already ({', '.join(twice)}) were rounded a "
            f"second time: {cost}; --weights source keeps them exactly"
        )


def write_report(report: AccuracyReport) -> None:
    """Print a report as a table."""
    write_table(
        (
            f"accuracy {report.accuracy}" + (f", {report.phase}" if report.phase else ""),
            "tokens",
            "mean KL",
            "99 % KL",
            "top-1",
            "perplexity",
            "in float32",
        ),
        [
            (
                text.text,
                f"{text.tokens:,}",
                f"{text.mean_kl:.2g}",
                f"{text.p99_kl:.2g}",
                f"{text.top1_agreement:.3f}",
                f"{text.perplexity:.2f}",
                f"{text.reference_perplexity:.2f}",
            )
            for text in (*report.texts, report.total)
        ],
        numbers=range(1, 7),
    )
