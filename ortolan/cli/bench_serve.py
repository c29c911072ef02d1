"""`ortolan bench --serve`: servers under load."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortolan.bench.serving.load import ServePlan
from ortolan.cli.options import Function, default_of
from ortolan.cli.output import one_line, write, write_json, write_table

if TYPE_CHECKING:
    from ortolan.client.access import AccessSettings

Progress = Callable[[str], None]


class _Range(click.ParamType[tuple[int, int]]):
    """Two whole numbers, "8,150", or one that is both."""

    name = "range"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = [int(part) for part in str(value).split(",")]
        except ValueError:
            numbers = []
        low, high = (numbers[0], numbers[-1]) if 0 < len(numbers) < 3 else (0, 0)
        if not 1 <= low <= high:
            self.fail(f"{value!r} is no range such as 8,150", param, ctx)
        return low, high


def _option(name: str, metavar: str, kind: Any, text: str) -> Callable[[Function], Function]:
    """An option that sets the field of ServePlan with that name, and has its default."""
    default = default_of(ServePlan, name)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return click.option(
        f"--{name.replace('_', '-').removesuffix('-s')}",
        name,
        metavar=metavar,
        type=kind,
        default=shown,
        show_default=shown is not None,
        help=f"--serve: {text}",
    )


_OPTIONS = (
    _option(
        "clients",
        "N",
        click.IntRange(1, 10_000),
        "so many clients, each with one request at a time.  [default: 16]",
    ),
    _option(
        "rate",
        "R",
        click.FloatRange(min=0, min_open=True, max=1e6),
        "R requests per second instead, Poisson arrivals.",
    ),
    click.option(
        "--trace",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="--serve: a recorded load, JSON Lines of arrival_s, prompt, max_tokens.",
    ),
    _option("requests", "N", click.IntRange(1, 1_000_000), "requests in a round."),
    _option("prompt_words", "A,B", _Range(), "words of a prompt, from A to B."),
    _option("output_tokens", "A,B", _Range(), "most tokens of an answer, from A to B."),
    _option("seed", "N", int, "decides prompts, lengths and arrivals."),
    _option(
        "warm_up",
        "N",
        click.IntRange(min=0),
        "requests before the first round, not measured.  [default: as many as clients]",
    ),
    _option(
        "timeout_s",
        "S",
        click.FloatRange(min=0, min_open=True),
        "seconds after which a request counts as lost.",
    ),
    click.option(
        "--ignore-eos",
        is_flag=True,
        help="--serve: send ignore_eos, so that every answer has its most tokens.",
    ),
)
LOAD_OPTIONS = (
    *("clients", "rate", "trace", "requests", "prompt_words", "output_tokens"),
    *("seed", "warm_up", "timeout_s", "ignore_eos"),
)


def load_options(command: Function) -> Function:
    """What says how servers are loaded; the command receives the values as `load`."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        load = {name: values.pop(name) for name in LOAD_OPTIONS}
        return command(load=load, **values)

    for option in reversed(_OPTIONS):
        option(gathered)
    return gathered  # type: ignore[return-value]  # click calls by keyword


def bench_servers(
    addresses: tuple[str, ...],
    load: dict[str, Any],
    access: AccessSettings,
    repeat: int,
    output: str,
    progress: Progress,
) -> None:
    """Measure the servers in turn and print the report. The others are held against the first."""
    from ortolan.bench.serving.load import read_trace
    from ortolan.bench.serving.report import serve_csv, serve_document
    from ortolan.bench.serving.rounds import run_serve_bench

    trace = load.pop("trace")
    plan = ServePlan(**load, repeat=repeat, trace=() if trace is None else read_trace(trace))
    try:
        results = run_serve_bench(addresses, plan, progress, access)
    finally:
        progress("")
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = serve_document(results, when)
    if output == "json":
        write_json(found)
    elif output == "csv":
        write(serve_csv(found))
    else:
        _write_report(found)


def _write_report(found: dict[str, Any]) -> None:
    _write_setting(found)
    _write_results(found["results"])
    _write_lost(found["results"])
    _write_ratios(found["results"])


def _write_setting(found: dict[str, Any]) -> None:
    machine, settings = found["machine"], found["settings"]
    load = machine["load_average"]
    mix = f"{settings['requests']} in a round, "
    if settings["trace"]:
        mix += "from the trace"
    else:
        words, tokens = settings["prompt_words"], settings["output_tokens"]
        mix += (
            f"prompts of {words[0]} to {words[1]} words, at most {tokens[0]} to {tokens[1]} "
            f"tokens, seed {settings['seed']}"
        )
    ending = ", end tokens ignored" if settings["ignore_eos"] else ""
    rows = [
        ("date", found["date"]),
        ("cpu", f"{machine['cpu']}, {machine['cores']} cores, {' '.join(machine['flags'])}"),
        ("load", "unknown" if load is None else f"{load:.2f}"),
        ("versions", ", ".join(f"{name} {text}" for name, text in found["versions"].items())),
        ("requests", f"{mix}{ending}"),
        ("arrivals", settings["arrivals"]),
        ("rounds", f"{settings['repeat']}, after {settings['warm_up_requests']} warm-up requests"),
    ]
    for name, server in found["servers"].items():
        said = [text for text in (server["software"], server["model"]) if text]
        rows.append((name, ", ".join(said) or "says nothing of itself"))
    write_table(None, rows)


def _write_results(results: list[dict[str, Any]]) -> None:
    header = ("server", "tokens/s", "±", "requests/s", "lost", "client cores")
    lines = [
        (
            row["system"],
            f"{row['tokens_per_s']['median']:.1f}",
            _plus_minus(row["tokens_per_s"]),
            f"{row['requests_per_s']['median']:.2f}",
            f"{row['requests'] - row['completed']} of {row['requests']}",
            f"{row['client_cores']:.2f}",
        )
        for row in results
    ]
    write_table(header, lines, numbers=range(1, len(header)))
    names = (
        ("ttft_ms", "first token"),
        ("token_ms", "per token after it"),
        ("end_to_end_ms", "whole answer"),
        ("late_ms", "sent late by the client"),
    )
    times = [
        (row["system"], text, *(_ms(row[name][p]) for p in ("p50", "p90", "p99")))
        for row in results
        for name, text in names
        if row[name] is not None
    ]
    if times:
        write_table(("server", "times in ms", "p50", "p90", "p99"), times, numbers=(2, 3, 4))


def _write_lost(results: list[dict[str, Any]]) -> None:
    notes = [
        (row["system"], str(kind["count"]), f"lost: {name}", one_line(kind["first"]))
        for row in results
        for name, kind in row["lost"].items()
    ]
    for row in results:
        if row["resent"]:
            text = "sent again: a kept connection was closed under them"
            notes.append((row["system"], str(row["resent"]), text, ""))
        if row["tokens_from"] in ("events", "both"):
            text = "tokens are counted events with text: the server gives no usage"
            notes.append((row["system"], "", text, ""))
    if notes:
        write_table(("server", "requests", "what", "the first of them"), notes, numbers=(1,))


def _write_ratios(results: list[dict[str, Any]]) -> None:
    header = ("against", f"{results[0]['system']} is", "rounds from", "to", "in")
    lines = [
        (
            row["system"],
            f"{row['ratio'][name]['median']:.2f} x",
            *(f"{row['ratio'][name][end]:.2f}" for end in ("low", "high")),
            text,
        )
        for row in results[1:]
        for name, text in (("tokens_per_s", "tokens per second"), ("ttft", "time to first token"))
        if row["ratio"][name] is not None
    ]
    if lines:
        write_table(header, lines, numbers=(1, 2, 3))


def _plus_minus(spread: dict[str, Any]) -> str:
    if not spread["median"]:
        return ""
    return f"{50 * (spread['high'] - spread['low']) / spread['median']:.0f}%"


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
