"""What a server answers before its model is loaded, and while it says goodbye."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_serving import NO_RETRY, PROMPT, MockService, in_loop

from ortolan.client.aio import AsyncClient
from ortolan.errors import EngineError
from ortolan.runtime.serve import server
from ortolan.runtime.serve.config import ServeConfig
from ortolan.runtime.serve.loading import LoadingEngine

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


class LoadingService(MockService):
    """Loads when the test sets `may_load`, by way of the real warming up."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.may_load = threading.Event()
        self._error = error
        self._loaded = self._engine
        self._engine = LoadingEngine()
        self._warm = False

    def _load(self) -> None:
        self.may_load.wait(60)
        if self._error is not None:
            raise self._error
        self._engine = self._loaded


class Life:
    """A server in this loop. `events`: listening, ready, and what it says, as they come."""

    def __init__(self, service: MockService, config: ServeConfig) -> None:
        self.events: asyncio.Queue[str] = asyncio.Queue()
        self.addresses: Any = None
        self.task = asyncio.create_task(
            server.serve(
                service,
                config,
                on_listening=self._listening,
                on_ready=lambda _: self.events.put_nowait("ready"),
                say=self.events.put_nowait,
            )
        )

    def _listening(self, addresses: server.Addresses) -> None:
        self.addresses = addresses
        self.events.put_nowait("listening")

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any, Any]:
        """Status, headers and JSON of an HTTP exchange."""

        def exchange() -> tuple[int, Any, Any]:
            connection = http.client.HTTPConnection(self.addresses.http, timeout=60)
            try:
                headers = {"Content-Type": "application/json"}
                connection.request(method, path, body and json.dumps(body), headers)
                response = connection.getresponse()
                return response.status, response.headers, json.loads(response.read())
            finally:
                connection.close()

        return await asyncio.to_thread(exchange)

    async def health(self) -> Any:
        async with grpc.aio.insecure_channel(self.addresses.grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return (await stub.Check(health_pb2.HealthCheckRequest())).status


@asynccontextmanager
async def life(service: MockService, **config: Any) -> AsyncIterator[Life]:
    """A listening server on free ports, which has ended by itself at the end."""
    one = Life(service, ServeConfig(grpc_port=0, http_port=0, **config))
    assert await one.events.get() == "listening"
    try:
        yield one
        await one.task
    finally:
        one.task.cancel()  # a test that failed has not sent its signal
        await asyncio.gather(one.task, return_exceptions=True)


def generate(one: Life) -> Any:
    async def call() -> Any:
        async with AsyncClient(one.addresses.grpc, retry=NO_RETRY) as client:
            return await client.generate(PROMPT, max_tokens=1, ignore_eos=True)

    return call()


@in_loop
async def test_server_answers_before_its_model_is_loaded() -> None:
    """A probe that is refused looks like a crash: the model would never get to be loaded."""
    service = LoadingService()
    async with life(service) as one:
        status, _, body = await one.ask("GET", "/health/live")
        assert (status, body) == (200, {"status": "live"})
        status, _, body = await one.ask("GET", "/health/ready")
        assert (status, body["reason"]) == (503, "the model is loading")
        status, headers, body = await one.ask("POST", "/v1/completions", {"prompt": PROMPT})
        assert (status, headers["Retry-After"]) == (503, "5")
        assert body["error"]["message"] == "the model is loading"
        assert await one.health() == NOT_SERVING
        with pytest.raises(EngineError, match="the model is loading") as refused:
            await generate(one)
        cause = refused.value.__cause__
        assert isinstance(cause, grpc.aio.AioRpcError)
        assert cause.code() == grpc.StatusCode.UNAVAILABLE
        assert "RetryInfo" in str(dict(cause.trailing_metadata() or ()))
        assert one.events.empty()
        service.may_load.set()
        assert await one.events.get() == "ready"
        # At once: whoever reads the word and asks must not be told otherwise.
        assert await one.health() == SERVING
        assert (await one.ask("GET", "/health/ready"))[0] == 200
        assert (await generate(one))[0].finish_reason == "length"
        os.kill(os.getpid(), signal.SIGTERM)


@in_loop
async def test_model_that_cannot_be_loaded_ends_the_server() -> None:
    """A server that listens but will never be ready is restarted by nobody."""
    service = LoadingService(EngineError("the sessions cannot be built"))
    with pytest.raises(EngineError, match="cannot be built"):
        async with life(service) as one:
            service.may_load.set()
    assert one.events.empty()  # never "ready"
    with pytest.raises(ConnectionRefusedError):
        await one.ask("GET", "/health/live")


class _Asyncio(ModuleType):
    """asyncio with a sleep that a test ends."""

    def __init__(self) -> None:
        super().__init__("asyncio")
        self.slept: list[float] = []
        self.over = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.over.wait()


def test_requests_are_taken_until_the_delay_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load balancers send requests for seconds after a server has said that it is not ready."""

    @in_loop
    async def test() -> None:
        clock = _Asyncio()
        monkeypatch.setattr(server, "asyncio", clock)
        async with life(MockService(), drain_delay=7) as one:
            assert await one.events.get() == "ready"
            os.kill(os.getpid(), signal.SIGTERM)
            assert await one.events.get() == (
                "SIGTERM: not ready; new requests are taken for 7 s more"
            )
            assert await one.health() == NOT_SERVING
            assert (await one.ask("GET", "/health/ready"))[0] == 503
            assert (await generate(one))[0].finish_reason == "length"
            body = {"prompt": PROMPT, "max_tokens": 1}
            assert (await one.ask("POST", "/v1/completions", body))[0] == 200
            clock.over.set()
            assert "no new requests" in await one.events.get()
        assert clock.slept == [7]

    run: Callable[[], None] = test
    run()
