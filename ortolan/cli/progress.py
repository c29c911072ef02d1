"""A progress bar, where somebody looks on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ortolan.cli.output import console, is_fancy

Progress = Callable[[str, int, int], None]  # of what, done, total


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A bar on standard error, where that is a terminal."""
    if not is_fancy(sys.stderr):
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
    # Left alone, rich would send to standard error what others print to standard output meanwhile.
    with Progress(
        *columns, console=console(sys.stderr), transient=True, redirect_stdout=False
    ) as bar:
        task = bar.add_task("")
        yield lambda name, done, total: bar.update(
            task, description=name, completed=done, total=total
        )
