"""`ortolan bench`: where the time goes, and how far from the machine's limits it is."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortolan.bench.cases import Plan
from ortolan.cli.access import ACCESS_OPTIONS, access_options
from ortolan.cli.bench_serve import LOAD_OPTIONS, bench_servers, load_options
from ortolan.cli.options import (
    MAX_THREADS,
    PROVIDER,
    Function,
    debug_option,
    default_of,
    engine_options,
)
from ortolan.cli.output import is_fancy, note, write, write_json
from ortolan.errors import UsageError

if TYPE_CHECKING:
    from ortolan.client.access import AccessSettings

_MOST = 1 << 20


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers, separated by commas."""

    name = "numbers"

    def __init__(self, most: int = _MOST) -> None:
        self._most = most

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers such as 1,4,16", param, ctx)
        if not all(1 <= number <= self._most for number in numbers):
            self.fail(f"{value!r} holds a number that is not from 1 to {self._most}", param, ctx)
        return numbers


def _shown(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _sweep(name: str, field: str, help_text: str) -> Callable[[Function], Function]:
    """An option that sets a sequence of Plan's, from which its default is read."""
    return click.option(
        f"--{name}",
        metavar="N,N,...",
        type=_Numbers(),
        default=_shown(default_of(Plan, field)),
        show_default=True,
        help=help_text,
    )


@click.command(short_help="Measure speed, and how far it is from the machine's limits.")
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "--serve",
    metavar="ADDRESS",
    help="Load a server instead of a bundle: http://host:port (OpenAI-compatible) or "
    "grpc://host:port (Ortolan's); https:// and grpcs:// for TLS.",
)
@click.option(
    "--threads",
    metavar="N,N,...",
    type=_Numbers(MAX_THREADS),
    help="Numbers of threads, each in a process of its own.  "
    "[default: the cores that this process may use]",
)
@_sweep("batch", "batches", "Rows that decode together.")
@_sweep("prompt", "prompts", "Lengths of prompts.")
@_sweep("context", "contexts", "Tokens that a row holds before decode.")
@click.option(
    "--repeat",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=default_of(Plan, "repeat"),
    show_default=True,
    help="Rounds, each of which runs every case once.",
)
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(2, 4096),
    default=default_of(Plan, "steps"),
    show_default=True,
    help="Tokens that a decode case makes in a round.",
)
@click.option("--profile", is_flag=True, help="Time per operator and per kind of layer, too.")
@click.option(
    "--against",
    metavar="NAME:PATH",
    multiple=True,
    help="Another engine in the same rounds: llama.cpp:FILE.gguf, genai:FOLDER, openvino:FILE; "
    "with --serve another server's address.",
)
@click.option(
    "--llama-bin",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Where llama-bench and llama-batched-bench are, if not on PATH.",
)
@click.option(
    "--env",
    "environments",
    metavar="NAME=PYTHON",
    multiple=True,
    help="The Python of a provider's environment, of those in --provider a,b; otherwise "
    "build/providers/NAME, where `make test-providers` builds one, or this one.",
)
@click.option(
    "--output",
    type=click.Choice(("table", "json", "csv")),
    default="table",
    show_default=True,
    help="The form of the report.",
)
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Draw batch scaling, context scaling and roofline: FILE.png, FILE.svg, or both.",
)
@click.option("--quick", is_flag=True, help="Small measurements of the machine; for tests.")
@load_options
@access_options
@engine_options(*PROVIDER, "cache_dir", "accuracy")
@debug_option
@click.pass_context
def bench(
    ctx: click.Context,
    bundle: Path | None,
    serve: str | None,
    threads: tuple[int, ...] | None,
    batch: tuple[int, ...],
    prompt: tuple[int, ...],
    context: tuple[int, ...],
    repeat: int,
    steps: int,
    profile: bool,
    against: tuple[str, ...],
    llama_bin: Path | None,
    environments: tuple[str, ...],
    output: str,
    plot: Path | None,
    quick: bool,
    load: dict[str, Any],
    access: AccessSettings,
    engine: dict[str, Any],
) -> None:
    """Measure BUNDLE's speed, prefill and decode apart, beside the bound that each one hits.

    With --provider a,b compare execution providers, each in an environment of its own, prefill and
    decode in the same rounds.

    With --serve, measure a running server: throughput and waiting times of many clients.

    Bytes and operations are counted from the graphs; the machine's read bandwidth and matrix
    peak are measured in the same rounds. Figures are medians over the rounds; a warm-up run of
    every case is left out. Needs the extra bench.
    """
    _check_mode(ctx, bundle, serve)
    if serve is not None:
        bench_servers((serve, *against), load, access, repeat, output, _progress)
        return
    assert bundle is not None
    from ortolan.optional import require
    from ortolan.runtime.machine import usable_cores

    providers = engine["provider"].split(",")
    comparing = len(providers) > 1 or bool(environments)
    # What a comparison runs, it runs in other environments, and counts no work of graphs.
    for package, extra in () if comparing else (("onnx", "bench"), ("onnxruntime", "cpu")):
        require(package, extra, "ortolan bench")
    if plot is not None:
        require("matplotlib", "bench", "--plot")
        from ortolan.bench.plot import check_target

        check_target(plot)
    if len({spec.partition(":")[0] for spec in against}) < len(against):
        raise UsageError("--against names one engine twice; compare with one of a kind at a time")
    plan = Plan(
        threads=threads or (usable_cores(),),
        batches=batch,
        prompts=prompt,
        contexts=context,
        steps=steps,
        repeat=repeat,
        quick=quick,
        profile=profile,
        engine=engine,
    )
    if comparing:
        from ortolan.cli.bench_compare import compare_providers

        compare_providers(
            *(bundle, plan, providers, environments, against, llama_bin, output, plot, _progress)
        )
        return
    _measure(bundle, plan, against, llama_bin, output, plot)


def _measure(
    bundle: Path,
    plan: Plan,
    against: Sequence[str],
    llama_bin: Path | None,
    output: str,
    plot: Path | None,
) -> None:
    """One provider, beside the bounds of the machine."""
    from ortolan.bench.report import as_csv, document
    from ortolan.bench.run import run_bench

    try:
        results = run_bench(bundle, plan, against, llama_bin, _progress)
    finally:
        _progress("")
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = document(results, bundle.absolute().name, when)
    if results.left_out:
        note(f"left out, too long for this bundle: {', '.join(results.left_out)}")
    if plot is not None:
        from ortolan.bench.plot import draw

        for path in draw(found, plot):
            note(f"figures: {path}")
    if output == "json":
        write_json(found)
    elif output == "csv":
        write(as_csv(found))
    else:
        from ortolan.cli.bench_table import write_report

        write_report(found)


# What means something both for a bundle and for a server.
_COMMON = ("bundle", "serve", "repeat", "against", "output")


def _check_mode(ctx: click.Context, bundle: Path | None, serve: str | None) -> None:
    """Raises UsageError unless there is a bundle or a server, and only options for it."""
    if (bundle is None) == (serve is None):
        raise UsageError("give either BUNDLE, to measure it here, or --serve ADDRESS")
    given = click.core.ParameterSource.COMMANDLINE
    for parameter in ctx.command.params:
        name = parameter.name or ""
        # Those without a value in the context, such as --debug, mean something everywhere.
        if name in _COMMON or ctx.get_parameter_source(name) is not given:
            continue
        for_servers = name in LOAD_OPTIONS or name in ACCESS_OPTIONS
        if name in ctx.params and for_servers != (serve is not None):
            mode = "a bundle" if serve is None else "a server"
            raise UsageError(f"{parameter.opts[0]} means nothing when {mode} is measured")


def _progress(text: str) -> None:
    """What runs now, in one line of a terminal that the next text replaces.

    Nothing that redraws by itself: it would run while something is measured.
    """
    if is_fancy(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
