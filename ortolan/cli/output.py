"""How the command line speaks: encoding, colour, tables, sizes, JSON."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def speak_utf8() -> None:
    """Use UTF-8 on the standard streams, whatever the locale says.

    What is no valid Unicode is escaped on output, and passed on as lone surrogates on input.
    """
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def write(text: str) -> None:
    """Text to standard output at once and unchanged (click.echo would take out escape codes)."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """One JSON object, readable by people too."""
    write(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def is_fancy(stream: TextIO) -> bool:
    """Whether the stream may have colour and moving parts: a terminal, and NO_COLOR not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def note(text: str) -> None:
    """A line beside the output proper: dim, on standard error."""
    sys.stderr.write(f"\x1b[2m{text}\x1b[0m\n" if is_fancy(sys.stderr) else f"{text}\n")
    sys.stderr.flush()


def console(stream: TextIO) -> Console:
    """A rich console that prints strings as they are, and plain text where nobody looks on."""
    from rich.console import Console

    fancy = is_fancy(stream)
    return Console(
        file=stream,
        force_terminal=fancy,
        no_color=not fancy,
        # A pipe has no width; rich would fold a table into 80 columns.
        width=None if stream.isatty() else 1000,
        markup=False,
        highlight=False,
        emoji=False,
    )


def write_table(
    header: Sequence[str] | None, rows: Sequence[Sequence[str]], numbers: Collection[int] = ()
) -> None:
    """Print a table and a blank line. `numbers`: columns to align on the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_header=header is not None, show_edge=False, pad_edge=False)
    for index, name in enumerate(header or rows[0]):
        justify: Literal["left", "right"] = "right" if index in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    terminal = console(sys.stdout)
    terminal.print(table)
    terminal.print()


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def megabytes(count: int) -> str:
    """Bytes as people read them: decimal units."""
    size = float(count)
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
