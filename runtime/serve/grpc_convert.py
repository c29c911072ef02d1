"""Between the messages of ortolan.v1 and the runtime's dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ortolan.errors import RequestError
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.runtime.engine.engine import EngineStats
from ortolan.runtime.params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    PositionLogprobs,
    TokenEvent,
    TokenLogprob,
)

# Fields of SamplingParams that have presence; their names are the runtime's own.
_SCALARS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "seed",
    "n",
    "logprobs",
    "prompt_logprobs",
)
SAMPLING_FIELDS = (*_SCALARS, "logit_bias", "stop", "stop_token_ids")

_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}

# Most positions with log-probabilities in one message. With 20 likeliest tokens each they take
# about 700 kB; clients in every language refuse messages above 4 MiB unless told otherwise.
_MOST_POSITIONS = 1024


def sampling_fields(message: pb.SamplingParams) -> dict[str, Any]:
    """The fields that the message sets, as arguments of the runtime's SamplingParams."""
    given: dict[str, Any] = {
        name: getattr(message, name) for name in _SCALARS if message.HasField(name)
    }
    if message.logit_bias:
        # One more than there may be is refused as any more would be, and sooner.
        given["logit_bias"] = dict(islice(message.logit_bias.items(), MAX_LOGIT_BIASES + 1))
    if message.stop:
        given["stop"] = tuple(message.stop)
    if message.stop_token_ids:
        given["stop_token_ids"] = tuple(message.stop_token_ids[: MAX_STOP_TOKEN_IDS + 1])
    return given


def messages_of(conversation: Iterable[pb.Message]) -> list[dict[str, Any]]:
    """A conversation as the chat template takes it."""
    return [
        {"role": one.role, "content": one.content if one.HasField("content") else None}
        for one in conversation
    ]


def prompt_of(request: pb.GenerateRequest) -> str | list[int]:
    """The prompt, text or ids. Raises RequestError if the request has neither."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
    raise RequestError("the prompt is absent; set text or token_ids")


def responses(event: TokenEvent) -> Iterator[pb.GenerateResponse]:
    """The event as messages: one, unless it holds very many log-probabilities."""
    prompt = event.prompt_logprobs
    for start in range(0, len(prompt) - _MOST_POSITIONS, _MOST_POSITIONS):
        yield pb.GenerateResponse(
            choice=event.choice,
            prompt_logprobs=_positions(prompt[start : start + _MOST_POSITIONS]),
        )
    # The last part, at most _MOST_POSITIONS, goes with the event itself.
    prompt = prompt[(max(len(prompt), 1) - 1) // _MOST_POSITIONS * _MOST_POSITIONS :]
    ids, logprobs = event.token_ids, event.logprobs
    while len(logprobs) > _MOST_POSITIONS:
        yield pb.GenerateResponse(
            choice=event.choice,
            token_ids=ids[:_MOST_POSITIONS],
            logprobs=_positions(logprobs[:_MOST_POSITIONS]),
            prompt_logprobs=_positions(prompt),
        )
        ids, logprobs, prompt = ids[_MOST_POSITIONS:], logprobs[_MOST_POSITIONS:], ()
    message = pb.GenerateResponse(
        choice=event.choice,
        text=event.text,
        token_ids=ids,
        finish_reason=_FINISH_REASONS[event.finish_reason],
    )
    if event.usage is not None:
        message.usage.prompt_tokens = event.usage.prompt_tokens
        message.usage.completion_tokens = event.usage.completion_tokens
        message.usage.cached_tokens = event.usage.cached_tokens
    if logprobs:
        message.logprobs.extend(_positions(logprobs))
    if prompt:
        message.prompt_logprobs.extend(_positions(prompt))
    yield message


def _positions(positions: Sequence[PositionLogprobs | None]) -> list[pb.PositionLogprobs]:
    return [
        pb.PositionLogprobs()
        if position is None
        else pb.PositionLogprobs(
            chosen=_logprob(position.chosen), top=[_logprob(token) for token in position.top]
        )
        for position in positions
    ]


def _logprob(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob, bytes=token.bytes)


def stats_message(stats: EngineStats, not_ready: str | None) -> pb.StatsResponse:
    """The engine's numbers, whose names are the message's."""
    fields = {
        field.name: getattr(stats, field.name)
        for field in pb.StatsResponse.DESCRIPTOR.fields
        if hasattr(stats, field.name)
    }
    return pb.StatsResponse(**fields, not_ready=not_ready or "")
