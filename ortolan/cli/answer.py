"""Following an answer as it is generated, what it took, and how JSON says it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ortolan.runtime.params import Completion, FinishReason


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
    @property
    def logprobs(self) -> tuple[Any, ...]: ...
    @property
    def prompt_logprobs(self) -> tuple[Any, ...]: ...


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
    logprobs: tuple[Any, ...] = ()
    prompt_logprobs: tuple[Any, ...] = ()

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
    logprobs: list[Any] = []
    prompt_logprobs: list[Any] = []
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
            logprobs += event.logprobs
            prompt_logprobs += event.prompt_logprobs
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
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompt_logprobs),
    )


def as_json(answer: Answer | Completion) -> dict[str, Any]:
    """The answer as JSON says it: log-probabilities only where they were asked for."""
    fields = {item.name: getattr(answer, item.name) for item in dataclasses.fields(answer)}
    usage = answer.usage
    fields["usage"] = usage and {
        name: getattr(usage, name)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    }
    for name in ("logprobs", "prompt_logprobs"):
        positions = fields.pop(name)
        if positions:
            fields[name] = [position and _position(position) for position in positions]
    return fields


def _position(position: Any) -> dict[str, Any]:
    top = [_logprob(entry) for entry in position.top]
    return {**_logprob(position.chosen), **({"top": top} if top else {})}


def _logprob(entry: Any) -> dict[str, Any]:
    """A token may be a part of a character, so its bytes are there too."""
    text = entry.bytes.decode("utf-8", "replace")
    return {
        "token_id": entry.token_id,
        "text": text,
        "bytes": list(entry.bytes),
        "logprob": entry.logprob,
    }


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
