"""The clients: retries, errors, both faces alike."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_serving import LONG, PROMPT, MockService, begun, in_loop, mock_serving, serving, until

import ortolan
from ortolan.client.aio import AsyncClient
from ortolan.client.calls import Attempts, RetryPolicy
from ortolan.client.sync import Client
from ortolan.errors import (
    EngineError,
    OverloadedError,
    RequestError,
    TimedOutError,
    UsageError,
)
from ortolan.runtime.params import Request

FAST = RetryPolicy(max_retries=3, backoff_s=0.001)


class _Flaky(MockService):
    """Turns the first calls away."""

    def __init__(self, error: Callable[[], Exception], times: int) -> None:
        super().__init__()
        self.error, self.times, self.asked = error, times, 0

    async def submit(self, request: Request) -> Any:
        self.asked += 1
        if self.asked <= self.times:
            raise self.error()
        return await super().submit(request)

    @property
    def not_ready(self) -> str | None:
        return None if self.asked > self.times else "the model is loading"


@asynccontextmanager
async def both_clients(
    service: MockService, retry: RetryPolicy
) -> AsyncIterator[list[Callable[..., Any]]]:
    """`generate` of the asynchronous and of the synchronous client, both as coroutines."""
    async with serving(service) as address:
        with Client(address, retry=retry) as client:
            async with AsyncClient(address, retry=retry) as other:

                async def generate(*args: Any, **settings: Any) -> Any:
                    return await asyncio.to_thread(client.generate, *args, **settings)

                yield [other.generate, generate]


ERRORS = [
    lambda: EngineError("the engine is shutting down"),
    lambda: OverloadedError("too much is waiting", 0.002),
]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", ERRORS)
@in_loop
async def test_call_that_is_turned_away_is_made_again(
    which: int, error: Callable[[], Exception]
) -> None:
    """A server that restarts or is full for a moment should cost a caller time, not an error."""
    service = _Flaky(error, times=2)
    retry = RetryPolicy(max_retries=2, backoff_s=0.001)
    async with both_clients(service, retry) as generate:
        assert await generate[which](PROMPT, max_tokens=2)
        assert service.asked == 3


@pytest.mark.parametrize("which", [0, 1])
@in_loop
async def test_retries_are_bounded(which: int) -> None:
    """A client that never gives up keeps a sick server sick."""
    service = _Flaky(lambda: OverloadedError("full", 0.001), times=100)
    async with both_clients(service, FAST) as generate:
        with pytest.raises(OverloadedError, match="full") as caught:
            await generate[which](PROMPT, max_tokens=2)
        assert service.asked == 1 + FAST.max_retries
        assert caught.value.retry_after_s == 0.001


@pytest.mark.parametrize("which", [0, 1])
@in_loop
async def test_hint_that_goes_past_the_calls_time_ends_it_at_once(which: int) -> None:
    """To wait for what cannot come in time wastes the caller's."""
    service = _Flaky(lambda: OverloadedError("full", 20.0), times=100)
    async with both_clients(service, FAST) as generate:
        with pytest.raises(OverloadedError):
            await generate[which](PROMPT, max_tokens=2, timeout_s=10)
        assert service.asked == 1


@pytest.mark.parametrize("which", [0, 1])
@in_loop
async def test_refused_request_is_not_made_again(which: int) -> None:
    """It will not get better."""
    service = _Flaky(lambda: RequestError("the prompt is odd"), times=100)
    async with both_clients(service, FAST) as generate:
        with pytest.raises(RequestError, match="odd"):
            await generate[which](PROMPT)
        assert service.asked == 1


@in_loop
async def test_stream_is_never_begun_again_after_its_first_event() -> None:
    """The caller has printed the beginning already."""
    service = MockService()
    async with serving(service) as address, AsyncClient(address, retry=FAST) as client:
        stream = await begun(service, client)
        draining = asyncio.ensure_future(service.drain(0))
        await until(lambda: service._engine._closing)
        service.gate.open()
        with pytest.raises(EngineError, match="closed"):
            [event async for event in stream]
        await draining


class _TurnedAway:
    """A gRPC error with a hint."""

    def __init__(self, code: grpc.StatusCode, hint_s: float | None) -> None:
        self._code, self._hint_s = code, hint_s

    def code(self) -> grpc.StatusCode:
        return self._code

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        if self._hint_s is None:
            return []
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromNanoseconds(int(self._hint_s * 1e9))
        status = status_pb2.Status()
        status.details.add().Pack(info)
        return [("grpc-status-details-bin", status.SerializeToString())]


def test_wait_is_the_servers_hint_and_some_chance_more() -> None:
    """Never earlier than asked, and not all together."""
    hinted = _TurnedAway(grpc.StatusCode.RESOURCE_EXHAUSTED, 2.0)
    waits = {Attempts(RetryPolicy(), None).wait_s(hinted) for _ in range(50)}
    assert len(waits) > 10
    assert all(wait is not None and 2.0 <= wait <= 2.5 for wait in waits)


def test_wait_without_a_hint_doubles() -> None:
    """An absent server is asked less and less often."""
    absent = _TurnedAway(grpc.StatusCode.UNAVAILABLE, None)
    attempts = Attempts(RetryPolicy(max_retries=3, backoff_s=1.0), None)
    for expected in (1.0, 2.0, 4.0):
        wait = attempts.wait_s(absent)
        assert wait is not None
        assert expected <= wait <= 1.25 * expected
    assert attempts.wait_s(absent) is None


def test_message_too_large_is_not_sent_again() -> None:
    """RESOURCE_EXHAUSTED without a hint is gRPC's own word for a message above its limit."""
    error = _TurnedAway(grpc.StatusCode.RESOURCE_EXHAUSTED, None)
    assert Attempts(RetryPolicy(), None).wait_s(error) is None


@in_loop
async def test_waiting_for_a_server_ends_when_it_is_ready() -> None:
    """Scripts start a server and a client together."""
    service = _Flaky(lambda: EngineError("loading"), times=0)
    service.times, service.asked = 1, 0
    async with serving(service) as address, AsyncClient(address) as client:
        with Client(address) as other:
            for wait in (client.wait_ready, lambda s: asyncio.to_thread(other.wait_ready, s)):
                service.asked = 0
                with pytest.raises(TimedOutError, match="the model is loading"):
                    await wait(0.3)
                waiting = asyncio.ensure_future(wait(30))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                service.asked = 2
                await waiting


def test_absent_server_is_named() -> None:
    """The first thing to go wrong for everybody."""
    with Client("127.0.0.1:9", retry=RetryPolicy(max_retries=0)) as client:
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 cannot be reached .* running\?"):
            client.stats(timeout_s=20)
        with pytest.raises(TimedOutError, match="within"):
            client.wait_ready(0.2)


def test_closed_client_says_so() -> None:
    client = Client("127.0.0.1:9")
    client.close()
    client.close()
    with pytest.raises(EngineError, match="closed"):
        client.stats()
    with pytest.raises(EngineError, match="closed"):
        client.generate("x")


@in_loop
async def test_closing_a_stream_of_the_synchronous_client_frees_its_slot() -> None:
    """`break` out of a loop is how people leave a stream."""
    async with mock_serving() as (service, other):

        def leave() -> None:
            with Client(other.address) as client:
                stream = client.stream(PROMPT, **LONG)
                next(stream)
                stream.close()  # type: ignore[attr-defined]
                deadline = time.monotonic() + 30
                while service._engine.busy and time.monotonic() < deadline:
                    service.gate.step()
                    time.sleep(0.002)

        service.hold()
        service.gate.step()
        service.gate.step()
        await asyncio.to_thread(leave)
        assert service.stats().ended == {"cancelled": 1}


@in_loop
async def test_client_is_safe_for_several_threads() -> None:
    """One client per process is what people make."""
    async with mock_serving() as (_, other):
        with Client(other.address) as client:
            found: list[Any] = []

            def ask() -> None:
                found.append(client.generate(PROMPT, **LONG)[0].token_ids)

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            assert len(found) == 8
            assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"max_token": 5}, UsageError, "max_token is no setting.*max_tokens"),
        ({"top_k": "five"}, RequestError, "top_k is 'five'"),
        ({"top_k": 2**40}, RequestError, "top_k is"),
        ({"stop_token_ids": [-1]}, RequestError, "stop_token_ids is"),
        ({"logit_bias": {"a": 1}}, RequestError, "logit_bias is"),
        ({"seed": 0.5}, RequestError, "seed is"),
    ],
)
def test_setting_that_cannot_be_sent_is_named(
    settings: dict[str, Any], kind: type[Exception], said: str
) -> None:
    """Nothing that a caller says is dropped on the way."""
    with Client("127.0.0.1:9") as client, pytest.raises(kind, match=said):
        client.generate("x", **settings)


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "x", "tool_calls": []}],
        [{"role": "user", "content": "\ud800"}],
        ["hello"],
    ],
)
def test_conversation_that_cannot_be_sent_is_refused(messages: Any) -> None:
    """What the wire has no place for is refused by name, not left out."""
    with Client("127.0.0.1:9") as client, pytest.raises(RequestError):
        client.chat(messages)


@pytest.mark.parametrize("prompt", [[1, "a"], [-1], [2**40], "\ud800", None])
def test_prompt_that_cannot_be_sent_is_refused(prompt: Any) -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(RequestError):
        client.generate(prompt)


def test_both_clients_have_the_same_face() -> None:
    """What is written twice must not drift apart."""
    for name in ("stream", "stream_chat", "generate", "chat", "models", "stats", "tokenize"):
        one, other = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(one).parameters == inspect.signature(other).parameters, name
    assert {n for n in vars(Client) if n[0] != "_"} == {n for n in vars(AsyncClient) if n[0] != "_"}


def test_front_door_names_both() -> None:
    assert (ortolan.Client, ortolan.AsyncClient) == (Client, AsyncClient)
