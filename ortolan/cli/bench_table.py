"""The tables of `ortolan bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ortolan.cli.output import megabytes, write_table

Row = dict[str, Any]


def write_report(found: dict[str, Any]) -> None:
    """Print what was measured on what, results, ratios and profiles."""
    _write_setting(found)
    ours = [row for row in found["results"] if row["system"] == "ortolan"]
    _write_phases(ours)
    _write_requests([row for row in ours if row["phase"] == "generate"])
    _write_ratios(found)
    for profile in found["profiles"]:
        _write_profile(profile)


def _write_setting(found: dict[str, Any]) -> None:
    rows = setting_rows(found)
    for peaks in found["peaks"]:
        products = ", ".join(
            f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in peaks["flops_per_s"].items()
        )
        reads = (
            f"reads {peaks['read_bytes_per_s'] / 1e9:.1f} GB/s "
            f"({peaks['dram_read_bytes_per_s'] / 1e9:.1f} past the caches)"
        )
        count = peaks["threads"]
        rows.append((f"{count} thread{'s' if count > 1 else ''}", f"{reads}, {products}"))
    for name, peer in found["peers"].items():
        rows.append((name, f"{peer['version']} ({peer['note']})"))
    write_table(None, rows)


def setting_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """When, where and what: the lines with which every report of a bundle begins."""
    machine, bundle, settings = found["machine"], found["bundle"], found["settings"]
    memory = machine["memory_bytes"]
    return [
        ("date", found["date"]),
        ("cpu", f"{machine['cpu']}, {machine['cores']} cores, {' '.join(machine['flags'])}"),
        ("memory", megabytes(memory) if memory else "unknown"),
        ("load", _load(machine)),
        ("versions", ", ".join(f"{name} {text}" for name, text in found["versions"].items())),
        ("bundle", f"{bundle['name']} from {bundle['source']}, attention {bundle['attention']}"),
        ("weights", f"SHA-256 {bundle['weights_sha256'][:16]}..."),
        *(("", f"{name}, {megabytes(size)}") for name, size in bundle["precision"].items()),
        ("rounds", f"{settings['repeat']}, after one warm-up run of each case"),
    ]


def _write_phases(rows: Sequence[Row]) -> None:
    header = (
        *("phase", "threads", "rows", "context", "tokens", "tokens/s", "±"),
        *("p50 ms", "p90", "p99", "bound ms", "by", "reached"),
    )
    lines = []
    for row in rows:
        if row["phase"] == "generate":
            continue
        time, token, bound = row["time_ms"], row["token_ms"], row["bound"]
        shown = token or {"p50": time["median"], "p90": None, "p99": None}
        lines.append(
            (
                row["phase"],
                str(row["threads"]),
                str(row["batch"]),
                str(row["context"]),
                str(row["tokens"]),
                f"{row['tokens_per_s']:.0f}",
                plus_minus(time),
                *(milliseconds(shown[name]) for name in ("p50", "p90", "p99")),
                milliseconds(max(bound["memory_ms"], bound["compute_ms"])),
                bound["limit"],
                f"{bound['fraction']:.0%}",
            )
        )
    write_table(header, lines, numbers=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12))


def _write_requests(rows: Sequence[Row]) -> None:
    if not rows:
        return
    header = (
        *("one request", "threads", "prompt", "tokens", "first token ms", "tokens/s", "±"),
        *("p50 ms", "p90", "p99", "outside the session"),
    )
    lines = [
        (
            f"{row['sampling']} sampling",
            str(row["threads"]),
            str(row["context"]),
            str(row["tokens"]),
            milliseconds(row["ttft_ms"]["median"]),
            f"{row['tokens_per_s']:.0f}",
            plus_minus(row["time_ms"]),
            *(milliseconds(row["token_ms"][name]) for name in ("p50", "p90", "p99")),
            f"{row['outside_session']:.1%}",
        )
        for row in rows
    ]
    write_table(header, lines, numbers=range(1, len(header)))


def _write_ratios(found: dict[str, Any]) -> None:
    rows = [row for row in found["results"] if row["ratio"] is not None]
    if not rows:
        return
    header = (
        *("against", "phase", "threads", "rows", "context", "tokens", "its tokens/s"),
        *("ortolan is", "rounds from", "to"),
    )
    lines = [
        (
            row["system"],
            row["phase"],
            *(str(row[name]) for name in ("threads", "batch", "context", "tokens")),
            f"{row['tokens_per_s']:.0f}",
            f"{row['ratio']['median']:.2f} x",
            *(f"{row['ratio'][name]:.2f}" for name in ("low", "high")),
        )
        for row in rows
    ]
    write_table(header, lines, numbers=range(2, len(header)))


def _write_profile(profile: dict[str, Any]) -> None:
    if profile["phase"] == "prefill":
        title = f"prefill {profile['tokens']}"
    else:
        title = f"decode, rows {profile['batch']}, context {profile['context']}"
    title += f": {profile['unit_ms']:.2f} ms ({profile['profiled_ms']:.2f} while profiled)"
    for name, lines in (("kind of layer", "by_kind"), ("operator", "by_operator")):
        write_table(
            (f"{title}, {name}", "nodes", "ms", "share", "bound by", "reached"),
            [
                (
                    line["name"],
                    str(line["count"]),
                    f"{line['ms']:.3f}",
                    f"{line['share']:.1%}",
                    line["limit"] or "",
                    f"{line['fraction']:.0%}" if line["limit"] else "",
                )
                for line in profile[lines]
            ],
            numbers=(1, 2, 3, 5),
        )


def _load(machine: dict[str, Any]) -> str:
    """How much of what was measured may be someone else's doing."""
    average, busy = machine["load_average"], machine["busy_elsewhere_cores"]
    parts = [] if average is None else [f"{average:.2f}"]
    if busy is not None:
        parts.append(f"{busy:.2f} cores busy with something else")
    return ", ".join(parts) or "unknown"


def plus_minus(spread: dict[str, Any]) -> str:
    """Half the spread over the median."""
    return f"{50 * (spread['high'] - spread['low']) / spread['median']:.0f}%"


def milliseconds(value: float | None) -> str:
    """With as many digits as are of use; empty for None."""
    if value is None:
        return ""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
