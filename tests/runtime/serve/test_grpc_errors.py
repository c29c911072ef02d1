"""Each status code: when it comes, and what its details say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_serving import (
    LONG,
    PROMPT,
    MockService,
    begun,
    failure,
    held,
    in_loop,
    mock_serving,
    unpacked,
    until,
)
from mock_engine import CONTEXT, NAN

from ortolan.errors import (
    CancelledError,
    EngineError,
    OrtolanError,
    OverloadedError,
    TemplateError,
    TimedOutError,
)
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1.ortolan_pb2_grpc import InferenceServiceStub
from ortolan.runtime.serve.grpc_errors import MOST_MESSAGE_BYTES, status_of

CODE = grpc.StatusCode


@asynccontextmanager
async def stub_of(**settings: Any) -> AsyncIterator[tuple[MockService, Any]]:
    """A mock service, and a bare stub: what any client would see."""
    async with (
        mock_serving(**settings) as (service, client),
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        yield service, InferenceServiceStub(channel)


async def _count(call: Any) -> int:
    return sum([len(message.token_ids) async for message in call])


def asked(ids: list[int] | None = None, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT if ids is None else ids),
        sampling=pb.SamplingParams(**sampling),
    )


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        (asked(temperature=float("nan")), "sampling.temperature", "nan"),
        (asked(temperature=-1), "sampling.temperature", "-1"),
        (asked(top_p=0), "sampling.top_p", "above 0"),
        (asked(top_k=51), "sampling.top_k", "50 tokens"),
        (asked(n=129), "sampling.n", "128"),
        (asked(n=0), "sampling.n", "from 1"),
        (asked(max_tokens=-1), "sampling.max_tokens", "-1"),
        (asked(logprobs=21), "sampling.logprobs", "20"),
        (asked(logit_bias={50: 1}), "sampling.logit_bias", "end at 49"),
        (asked(logit_bias={5: 101}), "sampling.logit_bias", "100"),
        (asked(stop_token_ids=[2**32 - 1]), "sampling.stop_token_ids", "end at 49"),
        (asked(stop_token_ids=[0] * 10**6), "sampling.stop_token_ids", "more than 1024"),
        (asked(logit_bias=dict.fromkeys(range(5000), 1)), "sampling.logit_bias", "more than 4096"),
        (
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=PROMPT), options=pb.RequestOptions(cache_salt="x" * 1025)
            ),
            "options.cache_salt",
            "more than 1024 characters",
        ),
        (asked(stop=[""]), "sampling.stop", "non-empty"),
        (asked([]), "prompt", "empty"),
        (asked([50]), "prompt", "0 to 49"),
        (
            asked([5] * (CONTEXT + 1)),
            "prompt",
            f"{CONTEXT + 1} tokens; the context holds {CONTEXT}",
        ),
        (pb.GenerateRequest(), "prompt", "absent"),
        (pb.GenerateRequest(text="x"), "prompt", "no tokenizer"),
        (
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5]), options=pb.RequestOptions(priority=101)
            ),
            "options.priority",
            "-100 to 100",
        ),
    ],
)
@in_loop
async def test_request_that_cannot_be_served_is_refused_by_field(
    request_: pb.GenerateRequest, field: str, said: str
) -> None:
    """vllm#16529, llama.cpp#17284: what is wrong is named, at admission, and nothing waits."""
    async with stub_of() as (service, stub):
        code, message, details = await failure(stub.Generate(request_))
        assert code is CODE.INVALID_ARGUMENT
        (violation,) = details["BadRequest"].field_violations
        assert violation.field == field
        assert said in violation.description
        assert violation.description == message
        assert details["ErrorInfo"].reason == "INVALID_REQUEST"
        assert details["ErrorInfo"].domain == "ortolan"
        assert service.stats().ended == {}


@in_loop
async def test_prompt_above_the_kv_budget_is_refused_with_both_numbers() -> None:
    """vllm#39734: what can never run must not wait forever."""
    async with stub_of(kv_budget=32) as (_, stub):
        code, message, _ = await failure(stub.Generate(asked([5] * 40)))
        assert code is CODE.INVALID_ARGUMENT
        assert "40 tokens" in message
        assert "32" in message


@in_loop
async def test_too_much_waiting_is_resource_exhausted_with_a_hint() -> None:
    """vllm#49445: past the cap the caller is told at once, and when to come back."""
    async with mock_serving(slots=1, max_waiting=1) as (service, client):
        stream = await begun(service, client)
        waiting = asyncio.ensure_future(client.generate(PROMPT, **LONG))
        await until(lambda: service.told)
        service.gate.step()
        await until(lambda: service.stats().waiting == 1)
        async with grpc.aio.insecure_channel(client.address) as channel:
            refused = asyncio.ensure_future(
                failure(InferenceServiceStub(channel).Generate(asked(**LONG)))
            )
            await held(service)
            await until(lambda: service.told)
            service.gate.open()
            code, _, details = await refused
        assert code is CODE.RESOURCE_EXHAUSTED
        assert details["RetryInfo"].retry_delay.seconds >= 1
        assert details["ErrorInfo"].reason == "OVERLOADED"
        await stream.aclose()
        await waiting


@in_loop
async def test_another_model_is_not_found() -> None:
    """Whoever asks for a model by name must not get another one's answer."""
    async with stub_of() as (_, stub):
        request = asked()
        request.model = "other" * 1000
        code, message, details = await failure(stub.Generate(request))
        assert code is CODE.NOT_FOUND
        assert "'mock'" in message
        assert len(message) < 500
        assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND"


@in_loop
async def test_request_that_fails_alone_is_internal_and_others_go_on() -> None:
    """sglang#33187: one request's NaN ends that request alone, and is no fault of its caller."""
    async with stub_of() as (service, stub):
        other = asyncio.ensure_future(_count(stub.Generate(asked(**LONG))))
        code, message, details = await failure(stub.Generate(asked([5, NAN, 6])))
        assert code is CODE.INTERNAL
        assert "NaN" in message
        assert details["ErrorInfo"].reason == "ENGINE_FAILED"
        assert await other == 80
        assert service.not_ready is None


@in_loop
async def test_server_that_shuts_down_is_unavailable() -> None:
    """The request is good; another server can take it."""
    async with stub_of() as (service, stub):
        await service.drain(0)
        code, _, details = await failure(stub.Generate(asked()))
        assert code is CODE.UNAVAILABLE
        assert details["ErrorInfo"].reason == "NOT_READY"
        assert details["RetryInfo"].retry_delay.seconds >= 1


@in_loop
async def test_fault_of_ours_says_nothing_about_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unexpected error's text may hold a prompt; it belongs neither in a log nor on the wire."""
    async with stub_of() as (service, stub):

        async def broken(request: Any) -> Any:
            raise ValueError("secret prompt")

        service.submit = broken  # type: ignore[method-assign]
        code, message, details = await failure(stub.Generate(asked()))
        assert code is CODE.INTERNAL
        assert "secret" not in message
        assert details["ErrorInfo"].reason == "UNEXPECTED"
        assert "Generate failed unexpectedly: ValueError" in caplog.text
        assert "secret" not in caplog.text.replace('raise ValueError("secret prompt")', "")


@in_loop
async def test_error_does_not_say_where_the_bundle_lies() -> None:
    """The server's folders are nobody's business."""
    async with stub_of() as (service, stub):

        async def broken(request: Any) -> Any:
            raise TemplateError(f"{service.bundle.path} has no chat template")

        service.submit = broken  # type: ignore[method-assign]
        _, message, _ = await failure(stub.Generate(asked()))
        assert message == "mock has no chat template"


@in_loop
async def test_call_without_time_is_over() -> None:
    """A deadline that has passed on the way must not start anything."""
    async with stub_of() as (service, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _count(stub.Generate(asked(), timeout=0))
        assert caught.value.code() is CODE.DEADLINE_EXCEEDED
        await until(lambda: not service._engine.busy)


@pytest.mark.parametrize(
    ("error", "unavailable", "code", "reason"),
    [
        (TemplateError("no"), False, CODE.INVALID_ARGUMENT, "TEMPLATE_REFUSED"),
        (OverloadedError("no", 2.5), False, CODE.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (OverloadedError("no", 2.5), True, CODE.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (TimedOutError("no"), False, CODE.DEADLINE_EXCEEDED, "TIMED_OUT"),
        (CancelledError("no"), False, CODE.CANCELLED, "CANCELLED"),
        (CancelledError("no"), True, CODE.UNAVAILABLE, "NOT_READY"),
        (EngineError("no"), False, CODE.INTERNAL, "ENGINE_FAILED"),
        (EngineError("no"), True, CODE.UNAVAILABLE, "NOT_READY"),
    ],
)
def test_each_error_of_ours_has_its_code(
    error: OrtolanError, unavailable: bool, code: grpc.StatusCode, reason: str
) -> None:
    """Clients in other languages decide by code and reason, never by our English."""
    status = status_of(error, unavailable=unavailable)
    assert status.code == code.value[0]
    assert unpacked(status)["ErrorInfo"].reason == reason


def test_retry_hint_is_the_engines() -> None:
    """A made-up hint sends everybody back at once."""
    details = unpacked(status_of(OverloadedError("no", 2.5), unavailable=False))
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 2500


@pytest.mark.parametrize("text", ["x" * 100_000, "€" * 50_000, "\ud800" * 10_000])
def test_error_text_is_bounded(text: str) -> None:
    """vllm#49239: an error that echoes its input would not fit into a trailer, and be lost."""
    status = status_of(EngineError(text), unavailable=False)
    assert len(status.message.encode()) <= MOST_MESSAGE_BYTES
    assert status.ByteSize() < 2 * MOST_MESSAGE_BYTES
