"""Around the calls: health, reflection, limits, slow readers, ports."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_serving import LONG, PROMPT, MockService, in_loop, mock_serving, serving, until

from ortolan.errors import RequestError, UsageError
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1.ortolan_pb2_grpc import InferenceServiceStub
from ortolan.runtime.engine.async_engine import AsyncStream
from ortolan.runtime.params import Request, TokenEvent, Usage
from ortolan.runtime.serve.grpc_server import MAX_RECEIVE_BYTES, GrpcServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    "name", ["", "ortolan.v1.InferenceService", "inference.GRPCInferenceService"]
)
@in_loop
async def test_health_watch_follows_the_service(name: str) -> None:
    """vllm#39863: readiness is the engine's, not the socket's."""
    async with (
        mock_serving() as (service, client),
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=name)
        watch = stub.Watch(request)
        assert (await watch.read()).status == SERVING
        service._warm = False
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(request)).status == NOT_SERVING
        service._warm = True
        assert (await watch.read()).status == SERVING
        await service.drain(0)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


@in_loop
async def test_health_follows_an_engine_that_has_died() -> None:
    """A broken engine behind an open port must get no traffic."""
    async with (
        mock_serving() as (service, client),
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        service._engine._tell(lambda: service._engine._engine.stop("gone"))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


@in_loop
async def test_watcher_of_health_does_not_hold_up_the_end() -> None:
    """A load balancer watches for as long as the server lives."""
    service = MockService()
    server = GrpcServer(service, "127.0.0.1", 0)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await service.drain(0)
        await asyncio.wait_for(server.stop(3600), 30)


@in_loop
async def test_reflection_describes_the_service() -> None:
    """grpcurl and its like work without our .proto file."""
    async with (
        mock_serving() as (_, client),
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ours = ("ortolan.v1.InferenceService", "inference.GRPCInferenceService")
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in ours),
        ]
        listed, *files = [reply async for reply in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert {*ours, "grpc.health.v1.Health"} <= names
        assert all(file.file_descriptor_response.file_descriptor_proto for file in files)


@in_loop
async def test_request_id_comes_back_and_is_made_up_where_it_is_useless() -> None:
    """Whoever reports a failed call can name it; nobody can write into our logs by it."""
    async with (
        mock_serving() as (_, client),
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        stub = InferenceServiceStub(channel)

        async def echoed(*metadata: tuple[str, str]) -> str:
            call = stub.Stats(pb.StatsRequest(), metadata=metadata)
            return str(dict(await call.initial_metadata())["x-request-id"])

        assert await echoed(("x-request-id", "mine-1")) == "mine-1"
        made_up = {await echoed(), await echoed(("x-request-id", "a b")), await echoed()}
        assert len(made_up) == 3
        assert await echoed(("x-request-id", "x" * 129)) != "x" * 129


@in_loop
async def test_message_above_the_limit_is_refused() -> None:
    """llama.cpp#27434: a huge body must not be read into memory first."""
    async with mock_serving() as (_, client):
        with pytest.raises(RequestError, match="size"):
            await client.tokenize("x" * (MAX_RECEIVE_BYTES + 1))
        # Nor one that is small on the wire and huge when it is unpacked.
        gzip = grpc.Compression.Gzip
        async with grpc.aio.insecure_channel(client.address, compression=gzip) as channel:
            huge = pb.TokenizeRequest(text="x" * (3 * MAX_RECEIVE_BYTES))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await InferenceServiceStub(channel).Tokenize(huge)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await client.stats()


class _Flood(MockService):
    """Answers with megabytes, as fast as they can be put."""

    def __init__(self) -> None:
        super().__init__()
        self.flood: AsyncStream | None = None

    async def submit(self, request: Request) -> AsyncStream:
        stream = AsyncStream(asyncio.get_running_loop(), lambda: None)
        for _ in range(30):
            stream.put(TokenEvent("x" * 1_000_000, (5,)))
        stream.put(TokenEvent("", (5,), "length", Usage(4, 31)))
        stream.end(None)
        self.flood = stream
        return stream


@in_loop
async def test_slow_reader_holds_back_its_own_stream_only() -> None:
    """vllm#56094: what nobody reads must not be copied into gRPC's buffers without end."""
    service = _Flood()
    async with (
        serving(service) as address,
        grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel,
    ):
        stub = InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT)))
        begun = await call.read()
        flood = service.flood
        assert flood is not None
        before = -1
        while before != len(flood._unread):  # as much is taken as the connection holds
            before = len(flood._unread)
            await asyncio.sleep(0.2)
        assert before > 0
        assert (await stub.Stats(pb.StatsRequest())).not_ready == ""
        # Read at last, nothing is missing.
        messages = [begun]
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert sum(len(message.token_ids) for message in messages) == 31


@in_loop
async def test_port_in_use_is_refused() -> None:
    """Two servers that share a port silently would each get every other connection."""
    async with mock_serving() as (service, client):
        port = int(client.address.rpartition(":")[2])
        with pytest.raises(UsageError, match=f"{port} for gRPC"):
            await GrpcServer(service, "127.0.0.1", port).start()


@in_loop
async def test_stop_lets_the_last_statuses_leave() -> None:
    """vllm#34730: a stream that a shutdown ends is told why, not cut."""
    service = MockService()
    server = GrpcServer(service, "127.0.0.1", 0)
    port = await server.start()
    service.hold()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = InferenceServiceStub(channel)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(**LONG)
        )
        calls = [stub.Generate(request) for _ in range(8)]
        await until(lambda: service.gate.waiting and service.stats().running > 0)
        await asyncio.sleep(0.1)  # so that all have arrived
        draining = asyncio.ensure_future(service.drain(0))
        await until(lambda: service._engine._closing)
        service.gate.open()
        await draining
        await server.stop(0)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError, match="engine") as caught:
                await _read(call)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@in_loop
async def test_stop_waits_for_a_reader_within_the_grace() -> None:
    """The engine has made the answer; a client on a thin line should get it."""
    service = _Flood()
    server = GrpcServer(service, "127.0.0.1", 0)
    port = await server.start()
    address, unlimited = f"127.0.0.1:{port}", [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, unlimited) as channel:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        call = InferenceServiceStub(channel).Generate(request)
        await until(lambda: service.flood is not None)
        await service.drain(0)
        stopping = asyncio.ensure_future(server.stop(30))
        await asyncio.sleep(0.5)
        assert not stopping.done()
        messages = [message async for message in call]
        assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
        await stopping


async def _read(call: Any) -> None:
    async for _ in call:
        pass
