"""How the command line speaks: encoding, colour, tables, sizes, JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ortolan.errors import OrtolanError

if TYPE_CHECKING:
    from rich.console import Console

_DIRECTIONS = frozenset(("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"))


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


def open_standard_streams() -> None:
    """Put the null device where a standard stream is closed.

    Otherwise the next file that is opened takes its number, and gets what is printed. A closed
    standard output can be written to no more, as if it were full.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            found = os.open(os.devnull, mode)
            if found != number:
                os.dup2(found, number)
                os.close(found)
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  (a number, kept open)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # also keeps the file open
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = _Output(sys.stdout.buffer, line_buffering=sys.stdout.line_buffering)


class OutputError(OrtolanError):
    """Standard output is full or closed."""


class _Output(io.TextIOWrapper):
    """Standard output, whose errors can be told from those of other files."""

    def write(self, text: str, /) -> int:
        with _named_errors():
            return super().write(text)

    def flush(self) -> None:
        with _named_errors():
            super().flush()


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # whoever read has read enough
        raise
    except OSError as error:
        raise OutputError(
            f"standard output cannot be written ({error.strerror}); send it where there is room"
        ) from error


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Show the warnings that the library logs, each once, with their fields."""
    logger, handler = logging.getLogger("ortolan"), _Warnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Warnings(logging.Handler):
    """`warning: message (field value, ...)` on standard error."""

    _own = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        fields = [f"{k} {v}" for k, v in vars(record).items() if k not in self._own]
        text = record.getMessage() + (f" ({', '.join(fields)})" if fields else "")
        if text not in self._shown:
            self._shown.add(text)
            note(f"warning: {one_line(text)}")


def complain(text: str) -> None:
    """A line on standard error as it is; where that cannot be written, nobody is told."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


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
    complain(f"\x1b[2m{text}\x1b[0m" if is_fancy(sys.stderr) else text)


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
        table.add_row(*map(visible, row))
    terminal = console(sys.stdout)
    terminal.print(table)
    terminal.print()


def one_line(text: str) -> str:
    """The text without line breaks, fit for a terminal."""
    return visible(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def visible(text: str) -> str:
    """The text with what would steer a terminal escaped: control and direction characters."""
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if unicodedata.category(char) == "Cc" or unicodedata.bidirectional(char) in _DIRECTIONS
        else char
        for char in text
    )


def megabytes(count: int) -> str:
    """Bytes as people read them: decimal units."""
    size = float(count)
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
