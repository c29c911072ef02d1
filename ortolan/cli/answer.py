"""Following an answer as it is generated, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ortolan.runtime.params import FinishReason


class UsageLike(Protocol):
    """A runtime's or a client's Usage."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class EventLike(Protocol):
    """A runtime's TokenEvent or a client's Event."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def usage(self) -> UsageLike | None: ...


@dataclass(frozen=True)
class Answer:
    """An answer and its timings.

    finish_reason and usage are None if the answer was interrupted.
    ttft_s: seconds from the request to the first token; None if there was none.
    tokens_per_s: of the tokens after those of the first event; None if there were none.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: UsageLike | None
    ttft_s: float | None
    tokens_per_s: float | None

    def timings(self) -> str:
        """One line: tokens in and out, time to first token, tokens per second."""
        parts = []
        if self.usage is not None:
            cached = f" ({self.usage.cached_tokens} cached)" if self.usage.cached_tokens else ""
            parts.append(f"{_tokens(self.usage.prompt_tokens)} read{cached}")
        parts.append(f"{_tokens(len(self.token_ids))} generated")
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s:.3f} s")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        return ", ".join(parts)


def follow(
    begin: Callable[[], Iterator[EventLike]],
    show: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Start an answer and hand its text on piece by piece, until it ends or `stopped` says so."""
    texts: list[str] = []
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    usage: UsageLike | None = None
    began_s = time.perf_counter()
    first_s = last_s = None
    in_first = 1
    events = begin()
    try:
        for event in events:
            if event.token_ids:
                last_s = time.perf_counter()
                if first_s is None:
                    first_s, in_first = last_s, len(event.token_ids)
                token_ids += event.token_ids
            texts.append(event.text)
            finish_reason, usage = event.finish_reason, event.usage
            if event.text:
                show(event.text)
            if stopped() and finish_reason is None:
                break
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()  # an answer that was stopped gives its slot back now
    after_first = len(token_ids) - in_first
    decode_s = last_s - first_s if first_s is not None and last_s is not None else 0.0
    return Answer(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        usage=usage,
        ttft_s=None if first_s is None else first_s - began_s,
        tokens_per_s=after_first / decode_s if decode_s > 0 else None,
    )


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
