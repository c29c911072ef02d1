"""`ortolan export`: a checkpoint becomes a bundle."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ortolan.cli.options import debug_option, json_option
from ortolan.cli.output import console, is_fancy, megabytes, write, write_json
from ortolan.errors import MissingDependencyError

Progress = Callable[[str, int, int], None]


# The defaults in the texts are ExportOptions', which cannot be read here: its module needs
# packages of the extra `export`. A test compares.
@click.command(short_help="Make a bundle of a checkpoint.")
@click.argument("source")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(["source", "float32"]),
    help="source: the checkpoint's precision, exactly; float32: expanded.  [default: source]",
)
@click.option(
    "--max-context",
    metavar="N",
    type=click.IntRange(min=2),
    help="Most positions that the bundle can be used with.  [default: the checkpoint's]",
)
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@json_option
@debug_option
def export(
    source: str,
    bundle: Path,
    weights: str | None,
    max_context: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the bundle of SOURCE: a .gguf file, or the name of a known checkpoint (smollm2).

    BUNDLE, a folder, appears when it is complete and not before.
    """
    exporter = _exporter()
    given: dict[str, Any] = {"weights": weights, "max_context": max_context, "force": force}
    options = exporter.ExportOptions(**{k: v for k, v in given.items() if v is not None})
    began_s = time.perf_counter()
    with _progress_bar() as progress:
        manifest = exporter.export_bundle(source, bundle, options, progress)
    seconds = time.perf_counter() - began_s
    size = sum(entry.size for entry in manifest.files.values())
    if as_json:
        write_json(
            {
                "bundle": str(bundle),
                "source": manifest.source.name,
                "bytes": size,
                "seconds": seconds,
            }
        )
    else:
        name = str(bundle)
        options_end = "-- " if name.startswith("-") else ""
        following = f'ortolan generate {options_end}{shlex.quote(name)} "..."'
        write(f"{bundle}: {megabytes(size)} in {seconds:.1f} s; next: {following}\n")


def _exporter() -> Any:
    """The module that exports, with an error that names the extra if a package is missing."""
    try:
        from ortolan.export import exporter
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "ortolan"):
            raise
        raise MissingDependencyError(package, "export", "exporting a checkpoint") from error
    return exporter


@contextmanager
def _progress_bar() -> Iterator[Progress | None]:
    """A bar on standard error, where that is a terminal."""
    if not is_fancy(sys.stderr):
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task("")
        yield lambda name, done, total: bar.update(
            task, description=name, completed=done, total=total
        )
