"""The server's log on standard error, as text or JSON lines, with events' fields."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from ortolan.cli.output import complain, note, visible

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[\w./:,+-]+")


@contextmanager
def logs_shown(form: Literal["text", "json"], level: str) -> Iterator[Callable[[str], None]]:
    """Log to standard error: our own events from `level` on, warnings of other libraries.

    Yields what says a line to whoever runs the server: by itself among text, in JSON as an event.
    """
    ours, root = logging.getLogger("ortolan"), logging.getLogger()
    before, before_level = ours.handlers[:], ours.level
    shown = _Shown(_json if form == "json" else _text)
    for handler in before:  # what shows warnings of other commands
        ours.removeHandler(handler)
    ours.setLevel(level.upper())
    root.addHandler(shown)
    try:
        yield logging.getLogger("ortolan.cli.serve").warning if form == "json" else note
    finally:
        root.removeHandler(shown)
        ours.setLevel(before_level)
        for handler in before:
            ours.addHandler(handler)


class _Shown(logging.Handler):
    def __init__(self, written: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self._written = written

    def emit(self, record: logging.LogRecord) -> None:
        complain(self._written(record))


def _text(record: logging.LogRecord) -> str:
    fields = "".join(f" {name}={_value(value)}" for name, value in _fields(record).items())
    text = "\n".join(map(visible, record.getMessage().splitlines()))
    return f"{_time(record)} {record.levelname} {record.name}: {text}{fields}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        value = ",".join(map(str, value))
    plain = str(value)
    return plain if _PLAIN.fullmatch(plain) else json.dumps(plain)


def _json(record: logging.LogRecord) -> str:
    line = {
        "time": _time(record),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
        **_fields(record),
    }
    return json.dumps(line, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {name: value for name, value in vars(record).items() if name not in _OWN}
    if record.exc_info and record.exc_info[0] is not None:
        # Its kind and its place; its text might hold a piece of a prompt.
        fields["error"] = record.exc_info[0].__name__
        fields["place"] = "".join(traceback.format_tb(record.exc_info[2]))
    return fields
