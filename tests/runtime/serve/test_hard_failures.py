"""A model that fails, an engine that hangs, a clock that jumps, seen by clients of both servers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("starlette")

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_serving import PROMPT, MockService, in_loop, until
from load_clients import (
    FaultError,
    Heard,
    Manner,
    Question,
    answered,
    ask_grpc,
    ask_http,
)
from mock_engine import NAN

from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1.ortolan_pb2_grpc import InferenceServiceStub
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.serve.grpc_server import GrpcServer
from ortolan.runtime.serve.http_app import create_app
from ortolan.runtime.serve.http_server import HttpServer
from ortolan.runtime.serve.service import Service

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
LONG = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Both:
    """Both servers of one service."""

    channel: Any
    http: str

    async def ask(self, protocol: str, question: Question) -> list[Heard]:
        if protocol == "http":
            return await ask_http(self.http, question, Manner())
        return await ask_grpc(InferenceServiceStub(self.channel), question, Manner())

    async def stats(self) -> Any:
        return await InferenceServiceStub(self.channel).Stats(pb.StatsRequest())

    async def health(self) -> int:
        request = health_pb2.HealthCheckRequest()
        return int((await health_pb2_grpc.HealthStub(self.channel).Check(request)).status)

    async def get(self, path: str, method: str = "GET", body: str = "") -> str:
        """A whole answer over HTTP, from its status on."""
        host, _, port = self.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"{method} {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        writer.write(
            f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        said = await reader.read(-1)
        writer.close()
        return said.decode().removeprefix("HTTP/1.1 ")


@asynccontextmanager
async def both(service: Service) -> AsyncIterator[Both]:
    """Both servers on this loop; nothing may be left in the engine at the end."""
    grpc_server = GrpcServer(service, "127.0.0.1", 0)
    http_server = HttpServer(create_app(service), "127.0.0.1", 0)
    grpc_port, http_port = await grpc_server.start(), await http_server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            yield Both(channel, f"127.0.0.1:{http_port}")
    finally:
        if isinstance(service, MockService):
            service.gate.open()  # or a test that failed would wait here for ever
        await service.drain(0)
        await asyncio.gather(grpc_server.stop(0), http_server.stop(0))
        stats = service.stats()
        await service.close()
        assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)


async def real_service(bundle: Path) -> Service:
    service = Service(Bundle.open(bundle), EngineConfig(max_slots=4, prefix_cache_mb=1))
    await service.warm_up()
    return service


def questions(bundle: Path) -> list[Question]:
    """Four prompts with all that they answer."""
    settings = {**LONG, "logprobs": 0}
    return answered(bundle, 64, [([5 + i, 9, 8, 7] * 5, settings) for i in range(4)])


def wrap_decode(service: Service, before: Callable[..., None]) -> None:
    """Calls `before` with the running choices ahead of every decode call."""
    engine = service._engine._engine
    decode = engine._model.decode

    def wrapped(*args: Any, **named: Any) -> Any:
        before(engine._scheduler.residents)
        return decode(*args, **named)

    engine._model.decode = wrapped  # type: ignore[method-assign]


def asked_of(service: MockService) -> int:
    """Requests that the engine has, or that are on their way to it."""
    stats = service.stats()
    return stats.running + stats.waiting + len(service._engine._inbox)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@in_loop
async def test_poisoned_row_ends_alone_on_both_servers(tiny_bundle: Path, protocol: str) -> None:
    """sglang#33187: one NaN in one request's KV costs that request, and nobody else a bit."""
    victim, *others = questions(tiny_bundle)
    service = await real_service(tiny_bundle)
    poisoned: list[int] = []

    def poison(residents: Any) -> None:
        for choice in residents:
            if choice.tokens[:20] == victim.prompt and choice.produced == 5 and not poisoned:
                service._engine._engine._model.cache.array[1, choice.slot, :, 3] = float("nan")
                poisoned.append(choice.slot)

    wrap_decode(service, poison)
    async with both(service) as servers:
        asked = [servers.ask(kind, one) for kind in ("grpc", "http") for one in others]
        failed, *heard = await asyncio.gather(
            servers.ask(protocol, victim), *asked, return_exceptions=True
        )
        assert poisoned
        assert isinstance(failed, FaultError)
        assert "NaN" in str(failed)
        for one, question in zip(heard, others * 2, strict=True):
            assert one[0].is_whole(question.whole[0])  # type: ignore[index]
        # Nothing of it is in a cache: the same prompt gives its answer now.
        assert (await servers.ask(protocol, victim))[0].is_whole(victim.whole[0])
        assert await servers.health() == SERVING


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@in_loop
async def test_request_that_makes_a_call_fail_ends_alone(protocol: str) -> None:
    """The fault switch of the mock model, in one prompt of several."""
    service = MockService()
    good = Question(PROMPT, LONG, [Heard()])
    bad = Question([5, 5, NAN, 5], LONG, [Heard()])
    async with both(service) as servers:
        failed, *heard = await asyncio.gather(
            servers.ask(protocol, bad),
            servers.ask("grpc", good),
            servers.ask("http", good),
            return_exceptions=True,
        )
        assert isinstance(failed, FaultError)
        assert [one[0].finish_reason for one in heard] == ["length"] * 2  # type: ignore[index]
        assert await servers.health() == SERVING


@in_loop
async def test_broken_session_ends_all_on_both_servers() -> None:
    """vllm#52852: every stream ends with the reason, and no more requests are sent here."""
    service = MockService()
    service.hold()
    question = Question(PROMPT, LONG, [Heard()])
    async with both(service) as servers:
        running = [
            asyncio.ensure_future(servers.ask(protocol, question))
            for protocol in ("grpc", "http", "grpc", "http", "grpc", "http")  # two of them wait
        ]
        await until(lambda: service.gate.waiting and asked_of(service) == len(running))
        service.model.broken = True
        service.gate.open()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, FaultError)
            assert "the mock session broke" in str(ended)
        assert "the mock session broke" in (await servers.stats()).not_ready
        ready = await servers.get("/health/ready")
        assert ready.startswith("503 ")
        assert "the mock session broke" in ready
        while await servers.health() != NOT_SERVING:
            await asyncio.sleep(0.02)
        for protocol, said in (("grpc", "the mock session broke"), ("http", "status 503")):
            with pytest.raises(FaultError, match=said):
                await servers.ask(protocol, question)


@in_loop
async def test_engine_that_does_not_move_is_not_ready() -> None:
    """vllm#39863: a session that hangs answers on its port, and serves nobody."""
    service = MockService()
    service.hold()
    async with both(service) as servers:
        hanging = asyncio.ensure_future(servers.ask("grpc", Question(PROMPT, LONG, [Heard()])))
        await until(lambda: service.gate.waiting)
        assert service.not_ready is None
        service._engine.heartbeat_s -= 3600.0
        assert service.not_ready == "the engine does not move"
        assert (await servers.get("/health/ready")).startswith("503 ")
        assert (await servers.get("/health/live")).startswith("200 ")
        while await servers.health() != NOT_SERVING:
            await asyncio.sleep(0.02)
        service.gate.open()
        await hanging
        assert service.not_ready is None


@in_loop
async def test_wall_clock_that_jumps_ends_nothing_early(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks are set while servers run; deadlines, heartbeats and waits are on another clock."""
    asked = questions(tiny_bundle)
    service = await real_service(tiny_bundle)
    rng, now = random.Random(3), time.time
    monkeypatch.setattr(time, "time", lambda: now() + rng.choice([-1, 1]) * rng.uniform(0, 1e8))
    limited = [
        Question(one.prompt, {**one.settings, "timeout_s": 3600.0}, one.whole) for one in asked
    ]
    async with both(service) as servers:
        heard = await asyncio.gather(
            *(servers.ask("http", one) for one in limited),
            *(servers.ask("grpc", one) for one in asked),
        )
        for one, question in zip(heard, asked * 2, strict=True):
            assert one[0].is_whole(question.whole[0])
        assert service.not_ready is None
        wrap_decode(service, lambda _: time.sleep(0.05))
        late = Question(asked[0].prompt, {**LONG, "timeout_s": 0.2}, [Heard()])
        with pytest.raises(FaultError, match=r"time is over|status 504"):
            await servers.ask("http", late)


@in_loop
async def test_bos_is_the_same_on_every_endpoint(tmp_path: Path) -> None:
    """vllm#6699: a prompt is the same tokens wherever it is sent, with one BOS in front."""
    pytest.importorskip("gguf")
    from tiny_llama import write_tiny_gguf

    from ortolan.export.exporter import ExportOptions, export_bundle

    with_bos = {"tokenizer.ggml.add_bos_token": True}
    gguf = write_tiny_gguf(tmp_path / "bos.gguf", types="Q4_1", override=with_bos)
    export_bundle(str(gguf), tmp_path / "bos", ExportOptions())
    service = await real_service(tmp_path / "bos")
    bos = service.tokenizer.bos_id
    async with both(service) as servers:
        stub = InferenceServiceStub(servers.channel)
        ids = list((await stub.Tokenize(pb.TokenizeRequest(text="the fox"))).token_ids)
        assert ids.count(bos) == 1
        assert ids[0] == bos
        told = await servers.get("/tokenize", "POST", '{"prompt": "the fox"}')
        assert f'"tokens": {ids}' in told
        sampling = pb.SamplingParams(max_tokens=1)
        call = stub.Generate(pb.GenerateRequest(text="the fox", sampling=sampling))
        (*_, last) = [message async for message in call]
        assert last.usage.prompt_tokens == len(ids)
        body = '{"prompt": "the fox", "max_tokens": 1}'
        told = await servers.get("/v1/completions", "POST", body)
        assert f'"prompt_tokens":{len(ids)}' in told.replace(" ", "")
