"""A gRPC server on the mock engine, whose steps a test can hold back one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2 as details_pb
from google.rpc import status_pb2
from mock_engine import CONFIG, END, MockModel, mock_engine

from ortolan.client.aio import AsyncClient
from ortolan.client.calls import RetryPolicy
from ortolan.runtime.engine.async_engine import AsyncEngine
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.serve.grpc_server import GrpcServer
from ortolan.runtime.serve.security import Security
from ortolan.runtime.serve.service import Service
from ortolan.runtime.text.no_tokenizer import NoTokenizer
from ortolan.runtime.text.prompts import Prompts

PROMPT = [5, 6, 7, 8]
LONG: dict[str, Any] = {"max_tokens": 80, "temperature": 0, "ignore_eos": True}
NO_RETRY = RetryPolicy(max_retries=0)


class Gate:
    """Holds a model's decode steps back: closed, each needs a `step()`."""

    def __init__(self, model: MockModel) -> None:
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()
        self._decode = model.decode
        self.passed = 0  # steps
        self._at_gate = False
        self._released = self._consumed = 0
        model.decode = self._gated  # type: ignore[method-assign]

    def _gated(self, *args: Any) -> Any:
        while not self._open.is_set() and not self._permits.acquire(timeout=0.01):
            self._at_gate = True
        self._at_gate = False
        self._consumed += not self._open.is_set()
        self.passed += 1
        return self._decode(*args)

    @property
    def waiting(self) -> bool:
        """Whether a step waits, and none that was let through is still on its way."""
        return self._at_gate and self._released == self._consumed

    def step(self) -> None:
        self._released += 1
        self._permits.release()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


class MockService(Service):
    """A service on the mock engine, warm from the start."""

    def __init__(self, **settings: Any) -> None:
        engine, self.model = mock_engine(**settings)
        self.gate = Gate(self.model)
        self.gate.open()
        self.name = "mock"
        self.created_s = int(time.time())
        self.manifest = SimpleNamespace(model=CONFIG, files={})  # type: ignore[assignment]
        self.bundle = SimpleNamespace(path=Path("/somewhere/mock"))  # type: ignore[assignment]
        self.config = EngineConfig(max_slots=settings.get("slots", 4))
        self.tokenizer = NoTokenizer({"eos_token_id": END})
        self.sampling_defaults = {}
        self._prompts = Prompts(SimpleNamespace(path=Path()), self.tokenizer)  # type: ignore[arg-type]
        self.context = engine.context
        self._engine = AsyncEngine(engine)
        self._warm = True
        self._leaving = self._draining = False
        self._watch("0.0", heartbeat_timeout_s=30.0)

    def hold(self) -> None:
        """From now on, decode steps wait for `gate.step()`."""
        self.gate.close()

    @property
    def told(self) -> bool:
        """Whether something, such as a cancellation, is on its way to the engine."""
        return bool(self._engine._inbox)


@asynccontextmanager
async def serving(service: Service, security: Security | None = None) -> AsyncIterator[str]:
    """A gRPC server on a free port; its address. Nothing may be left in the engine at the end."""
    server = GrpcServer(service, "127.0.0.1", 0, security)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        if isinstance(service, MockService):
            service.gate.open()
        await service.drain(0)
        await server.stop(0)
        stats = service.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)


@asynccontextmanager
async def mock_serving(**settings: Any) -> AsyncIterator[tuple[MockService, AsyncClient]]:
    """A mock service, and a client of it that does not try again."""
    service = MockService(**settings)
    async with serving(service) as address, AsyncClient(address, retry=NO_RETRY) as client:
        yield service, client


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Runs a coroutine as a test, which may take at most 60 s."""

    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))  # type: ignore[arg-type]

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    run.__wrapped__ = test  # type: ignore[attr-defined]  # pytest reads the fixtures' names here
    return run


async def begun(service: MockService, client: AsyncClient, **settings: Any) -> Any:
    """A stream whose first event has come; the engine is held in a later step."""
    service.hold()
    stream = client.stream(PROMPT, **{**LONG, **settings})
    first = asyncio.ensure_future(anext(stream))
    while not first.done():
        await held(service)
        service.gate.step()
        await asyncio.wait([first], timeout=0.05)
    await first
    await held(service)
    return stream


async def held(service: MockService) -> None:
    """Returns when the engine waits at the gate."""
    await until(lambda: service.gate.waiting)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; the test's own limit ends waiting in vain."""
    while not condition():
        await asyncio.sleep(0.002)


async def failure(call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """A failing call's code, its text, and its details by kind."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ended(call)
    error = caught.value
    status = status_pb2.Status.FromString(
        dict(error.trailing_metadata())["grpc-status-details-bin"]
    )
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    return error.code(), str(error.details()), unpacked(status)


def unpacked(status: status_pb2.Status) -> dict[str, Any]:
    """A status's details by kind."""
    kinds = (details_pb.BadRequest, details_pb.RetryInfo, details_pb.ErrorInfo)
    found = {}
    for packed in status.details:
        for kind in kinds:
            if packed.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = kind.FromString(packed.value)
    return found


async def ended(call: Any) -> None:
    """Reads a call of any kind to its end, which may be the error that it raises."""
    if hasattr(call, "__await__"):
        await call
    else:
        while await call.read() is not grpc.aio.EOF:
            pass
