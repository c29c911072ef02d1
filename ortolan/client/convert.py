"""Between what a caller gives and gets and the messages of ortolan.v1."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortolan.client.types import (
    Answer,
    Event,
    FinishReason,
    Logprob,
    Messages,
    Model,
    PositionLogprobs,
    Prompt,
    Settings,
    Stats,
    Usage,
)
from ortolan.errors import EngineError, RequestError, UsageError
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb

_SAMPLING = tuple(field.name for field in pb.SamplingParams.DESCRIPTOR.fields)
_OPTIONS = tuple(field.name for field in pb.RequestOptions.DESCRIPTOR.fields)
_KNOWN = (*_SAMPLING, *_OPTIONS, "timeout_s", "request_id")

_FINISH_REASONS: dict[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class Asked:
    """A call as it is to be made."""

    message: Any
    timeout_s: float | None = None
    metadata: tuple[tuple[str, str], ...] = ()


def asked_to_generate(prompt: Prompt, settings: Settings) -> Asked:
    """Raises RequestError naming the setting whose value has the wrong type."""
    if isinstance(prompt, str):
        given: dict[str, Any] = {"text": _unicode(prompt, "the prompt")}
    else:
        given = {"token_ids": token_ids(prompt)}
    return _asked(pb.GenerateRequest, given, settings)


def asked_to_chat(messages: Messages, settings: Settings) -> Asked:
    """Raises RequestError naming the setting whose value has the wrong type."""
    return _asked(pb.ChatRequest, {"messages": conversation(messages)}, settings)


def conversation(messages: Messages) -> list[pb.Message]:
    """Messages with a role and a content that is text or None."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages is not a list of messages; give a list")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def token_ids(ids: Iterable[int]) -> pb.TokenIds:
    """Token ids of a prompt."""
    try:
        return pb.TokenIds(ids=[int(token_id) for token_id in ids])
    except (TypeError, ValueError):
        raise RequestError(
            "a prompt must be text or a list of token ids, which are whole numbers from 0"
        ) from None


def _message(message: object, where: str) -> pb.Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} is not an object with a role; give it a role that is text")
    if unknown := sorted(set(map(str, message)) - {"role", "content"}):
        raise RequestError(f"{where} has {unknown[0]}; only role and content are served")
    content = message.get("content")
    if content is None:
        return pb.Message(role=_unicode(message["role"], where))
    if not isinstance(content, str):
        raise RequestError(f"{where}.content is not text or None, which alone are served")
    return pb.Message(role=_unicode(message["role"], where), content=_unicode(content, where))


def _unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{where} is not valid Unicode; it holds a lone surrogate") from None
    return text


def _asked(kind: Any, given: dict[str, Any], settings: Settings) -> Asked:
    values: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    for name in values:
        if name not in _KNOWN:
            nearest = difflib.get_close_matches(name, _KNOWN, 1, 0)
            raise UsageError(f"{name} is no setting of a call; did you mean {nearest[0]}?")
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    sampling = _fill(pb.SamplingParams(), values, _SAMPLING)
    options = _fill(pb.RequestOptions(), values, _OPTIONS)
    request_id = values.get("request_id")
    return Asked(
        kind(**given, sampling=sampling, options=options),
        values.get("timeout_s"),
        (("x-request-id", str(request_id)),) if request_id is not None else (),
    )


def _fill(message: Any, values: Mapping[str, Any], names: Iterable[str]) -> Any:
    for name in names:
        if name in values:
            try:
                message.MergeFrom(type(message)(**{name: values[name]}))
            except (TypeError, ValueError):
                shown = reprlib.repr(values[name])
                raise RequestError(
                    f"{name} is {shown}, which is of the wrong type or out of its range"
                ) from None
    return message


def event_of(message: pb.GenerateResponse) -> Event:
    """A message of a stream."""
    usage = message.usage if message.HasField("usage") else None
    return Event(
        message.text,
        tuple(message.token_ids),
        _FINISH_REASONS[message.finish_reason],
        usage and Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        tuple(_position(position) for position in message.logprobs),
        message.choice,
        tuple(
            _position(position) if position.HasField("chosen") else None
            for position in message.prompt_logprobs
        ),
    )


def _position(position: pb.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        _logprob(position.chosen), tuple(_logprob(token) for token in position.top)
    )


def _logprob(token: pb.TokenLogprob) -> Logprob:
    return Logprob(token.token_id, token.bytes, token.logprob)


class Answers:
    """Events of a stream on their way to whole answers."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._events: dict[int, list[Event]] = {}
        self._ttft_s: dict[int, float] = {}

    def add(self, event: Event) -> None:
        if event.token_ids:
            self._ttft_s.setdefault(event.choice, time.perf_counter() - self._began_s)
        self._events.setdefault(event.choice, []).append(event)

    def whole(self) -> list[Answer]:
        """All of them, in the order of the choices. Raises EngineError if one has no end."""
        return [self._one(choice) for choice in sorted(self._events)]

    def _one(self, choice: int) -> Answer:
        events = self._events[choice]
        last = events[-1]
        if last.finish_reason is None or last.usage is None:
            raise EngineError("the server's stream ended before its answer did; try again")
        return Answer(
            "".join(event.text for event in events),
            tuple(token_id for event in events for token_id in event.token_ids),
            last.finish_reason,
            last.usage,
            self._ttft_s.get(choice, time.perf_counter() - self._began_s),
            tuple(position for event in events for position in event.logprobs),
            tuple(position for event in events for position in event.prompt_logprobs),
        )


def model_of(message: pb.Model) -> Model:
    """What GetModel answers."""
    defaults = {field.name: value for field, value in message.sampling_defaults.ListFields()}
    values = {
        field.name: getattr(message, field.name)
        for field in dataclasses.fields(Model)
        if field.name != "sampling_defaults"
    }
    return Model(**values, sampling_defaults=defaults)


def stats_of(message: pb.StatsResponse) -> Stats:
    """What Stats answers."""
    values = {field.name: getattr(message, field.name) for field in dataclasses.fields(Stats)}
    maps = {"ended": dict(message.ended), "phase_seconds": dict(message.phase_seconds)}
    return Stats(**{**values, **maps})


def tokenize_request(prompt: str | Messages) -> pb.TokenizeRequest:
    """For a text or a conversation."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(text=_unicode(prompt, "the prompt"))
    return pb.TokenizeRequest(conversation=pb.Conversation(messages=conversation(prompt)))
