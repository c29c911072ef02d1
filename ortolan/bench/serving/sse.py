"""A stream of server-sent events, stamped as it arrived, to the outcome of a completion.

Sources: the HTML standard, section 9.2.6, for the events; OpenAI's API for what is in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ortolan.bench.serving.outcome import ERROR, MALFORMED, NO_FINISH, Outcome

# When bytes arrived (seconds), and which.
Piece = tuple[float, bytes]

_DETAIL_CHARS = 200


def events(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The data of each event, stamped with the time at which its end arrived."""
    rest, data = b"", list[bytes]()
    for arrived_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield arrived_s, b"\n".join(data)
                data = []


def read_completion(pieces: Iterable[Piece], end_s: float) -> Outcome:
    """What the whole body of a streamed completion says."""
    text_s: list[float] = []
    choice_s: list[float] = []
    finish_reason: str | None = None
    usage: int | None = None
    for arrived_s, data in events(pieces):
        if data == b"[DONE]":
            continue
        try:
            value: Any = json.loads(data)
            if (problem := value.get("error")) is not None:
                return Outcome(end_s, lost=ERROR, detail=message_of(problem))
            for choice in value.get("choices") or ():
                choice_s.append(arrived_s)
                if choice.get("text"):
                    text_s.append(arrived_s)
                finish_reason = choice.get("finish_reason") or finish_reason
            count = (value.get("usage") or {}).get("completion_tokens")
            usage = count if isinstance(count, int) else usage
        except (ValueError, AttributeError, TypeError):
            shown = data[:_DETAIL_CHARS].decode("utf-8", "replace")
            return Outcome(end_s, lost=MALFORMED, detail=f"an event is {shown!r}")
    if finish_reason is None:
        return Outcome(end_s, lost=NO_FINISH, detail=f"{len(text_s)} events with text")
    # An answer of tokens without text, such as special ones, still has a first event.
    times_s = text_s or choice_s
    return Outcome(
        end_s,
        first_s=times_s[0],
        last_s=times_s[-1],
        tokens=len(text_s) if usage is None else usage,
        from_usage=usage is not None,
        finish_reason=finish_reason,
    )


def message_of(problem: Any) -> str:
    """The sentence in an error, whatever its form, cut to a readable length."""
    if isinstance(problem, dict):
        inner = problem.get("error", problem)
        problem = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(problem)[:_DETAIL_CHARS]
