"""What is known of a request that has ended: for metrics, logs and traces."""

from __future__ import annotations

from dataclasses import dataclass

from ortolan.runtime.engine.life import Choice, RequestHandle


@dataclass(frozen=True)
class RequestRecord:
    """A request that has ended. Times are seconds since it was submitted.

    reasons: what each of its choices ended as: stop, length, cancelled, timed out, failed.
    admitted_s: when its first choice got a slot; first_token_s: when the first token was drawn;
    None where it did not come so far.
    token_s: for each choice of two tokens or more, seconds per token after its first.
    """

    reasons: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    admitted_s: float | None
    first_token_s: float | None
    ended_s: float
    token_s: tuple[float, ...]


def record_of(handle: RequestHandle) -> RequestRecord:
    """The record of a request, be it that an engine that broke did not come to its end."""
    choices, began = handle.choices, handle.began
    firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
    ends = [choice.ended_s for choice in choices if choice.ended_s is not None]
    return RequestRecord(
        reasons=tuple(choice.reason or "failed" for choice in choices),
        prompt_tokens=len(handle.request.prompt_ids),
        cached_tokens=choices[0].cached_tokens,
        completion_tokens=sum(choice.produced for choice in choices),
        admitted_s=None if handle.admitted_s is None else handle.admitted_s - began,
        first_token_s=min(firsts) - began if firsts else None,
        ended_s=max(ends, default=began) - began,
        token_s=tuple(seconds for choice in choices for seconds in _token_s(choice)),
    )


def _token_s(choice: Choice) -> tuple[float, ...]:
    if choice.first_token_s is None or choice.ended_s is None or choice.produced < 2:
        return ()
    return ((choice.ended_s - choice.first_token_s) / (choice.produced - 1),)
