"""Events as messages: nothing is lost, and no message is too large for a client."""

from __future__ import annotations

import dataclasses

import pytest

from ortolan.client import types
from ortolan.client.convert import Answers, event_of
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.runtime.engine.engine import EngineStats
from ortolan.runtime.params import (
    PositionLogprobs,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from ortolan.runtime.serve.grpc_convert import responses, sampling_fields

# What clients of every language take unless told otherwise.
USUAL_LIMIT = 4 * 2**20


def position(token_id: int) -> PositionLogprobs:
    tokens = [TokenLogprob(token_id, b"a long token of text", -1.5 - i) for i in range(21)]
    return PositionLogprobs(tokens[0], tuple(tokens[1:]))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 2048, 5000])
@pytest.mark.parametrize("prompt", [0, 1, 1024, 1025, 5000])
def test_event_of_any_size_arrives_whole_in_messages_of_usual_size(count: int, prompt: int) -> None:
    """A merged event of a slow reader, or a long prompt's scores, must not break its client."""
    ids = tuple(range(count))
    event = TokenEvent(
        "text",
        ids,
        "length",
        Usage(prompt, count, 3),
        tuple(map(position, ids)),
        choice=2,
        prompt_logprobs=tuple(position(i) if i else None for i in range(prompt)),
    )
    messages = list(responses(event))
    assert all(message.ByteSize() < USUAL_LIMIT for message in messages)
    assert [bool(message.finish_reason) for message in messages[:-1]] == [False] * (
        len(messages) - 1
    )
    answers = Answers()
    for message in messages:
        assert message.choice == 2
        assert len(message.logprobs) == len(message.token_ids)
        answers.add(event_of(pb.GenerateResponse.FromString(message.SerializeToString())))
    (answer,) = answers.whole()
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("text", ids, "length")
    assert dataclasses.asdict(answer.usage) == dataclasses.asdict(event.usage or Usage(0, 0))
    assert list(map(tuple_of, answer.logprobs)) == list(map(tuple_of, event.logprobs))
    assert list(map(tuple_of, answer.prompt_logprobs)) == list(map(tuple_of, event.prompt_logprobs))


def tuple_of(found: types.PositionLogprobs | PositionLogprobs | None) -> object:
    return found and [(t.token_id, t.bytes, t.logprob) for t in (found.chosen, *found.top)]


def test_every_sampling_setting_has_a_field_with_presence() -> None:
    """A setting that the wire does not know is ignored in silence; one without presence is 0."""
    message = pb.SamplingParams.DESCRIPTOR
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {field.name for field in message.fields} == names
    assert sampling_fields(pb.SamplingParams()) == {}
    zeros = {f.name: 0 for f in message.fields if not f.is_repeated}
    given = sampling_fields(pb.SamplingParams(**zeros))  # type: ignore[arg-type]
    assert given == zeros


def test_settings_of_the_client_are_those_of_the_wire() -> None:
    """Settings, which type checkers read, must not drift from what is sent."""
    named = set(types.Settings.__annotations__)
    sampling = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    options = {field.name for field in pb.RequestOptions.DESCRIPTOR.fields}
    assert named == sampling | options | {"timeout_s", "request_id"}


@pytest.mark.parametrize(
    ("kind", "message"), [(types.Model, pb.Model), (types.Stats, pb.StatsResponse)]
)
def test_the_clients_dataclasses_are_the_messages(kind: type, message: object) -> None:
    """A field that the server sends and the client drops is there for nobody."""
    names = [field.name for field in message.DESCRIPTOR.fields]  # type: ignore[attr-defined]
    assert [field.name for field in dataclasses.fields(kind)] == names


def test_engines_numbers_are_on_the_wire() -> None:
    """A number that the engine counts and nobody can read is no number."""
    names = {field.name for field in dataclasses.fields(EngineStats)} - {"broken"}
    assert names < {field.name for field in pb.StatsResponse.DESCRIPTOR.fields}
