"""The server's log as lines on standard error."""

from __future__ import annotations

import json
import logging

import pytest

from ortolan.cli.logs import logs_shown
from ortolan.cli.output import warnings_shown

FIELDS = {"request_id": "a1", "finish_reasons": ["stop", "length"], "ttft_ms": 1.5}


def test_text_lines_hold_the_events_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """grep and awk read them."""
    with logs_shown("text", "info"):
        logging.getLogger("ortolan.test").info("call finished", extra=FIELDS)
        logging.getLogger("ortolan.test").debug("too much")
        logging.getLogger("elsewhere").info("not ours")
        logging.getLogger("elsewhere").warning("still wanted", extra={"why": "a b"})
    first, second = capsys.readouterr().err.splitlines()
    time, _, rest = first.partition(" ")
    assert time.endswith("+00:00")
    assert rest == (
        "INFO ortolan.test: call finished request_id=a1 finish_reasons=stop,length ttft_ms=1.5"
    )
    assert second.endswith('WARNING elsewhere: still wanted why="a b"')


def test_json_lines_are_objects_with_the_events_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A collector takes each line as it is; one that is not JSON is lost."""
    with logs_shown("json", "debug") as say:
        logging.getLogger("ortolan.test").debug("one\nand \x1b[2m two", extra=FIELDS)
        logging.getLogger("elsewhere").warning("odd", extra={"field": object()})
        say("SIGTERM: stopping")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == {
        "time": lines[0]["time"],
        "level": "debug",
        "logger": "ortolan.test",
        "message": "one\nand \x1b[2m two",
        **FIELDS,
    }
    assert [line["message"] for line in lines[1:]] == ["odd", "SIGTERM: stopping"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_exceptions_are_shown_by_kind_and_place_only(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their text may quote what they choked on, which is a user's prompt."""
    with logs_shown(form, "info"):  # type: ignore[arg-type]
        try:
            raise ValueError("a prompt")
        except ValueError:
            logging.getLogger("elsewhere").exception("it failed")
    said = capsys.readouterr().err
    assert "a prompt" not in said.replace('raise ValueError("a prompt")', "").replace(
        'raise ValueError(\\"a prompt\\")', ""
    )
    assert "ValueError" in said
    assert "test_cli_logs.py" in said


def test_what_was_set_up_before_is_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that uses the library has a log of its own; and nothing is said twice."""
    ours, root = logging.getLogger("ortolan"), logging.getLogger()
    with warnings_shown():
        before = ours.handlers[:], ours.level, root.handlers[:]
        with logs_shown("text", "error"):
            ours.warning("below the level")
            ours.error("once")
        assert (ours.handlers, ours.level, root.handlers) == before
    assert capsys.readouterr().err.count("\n") == 1
