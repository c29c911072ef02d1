"""Readiness follows the engine's heartbeat, on both protocols alike."""

from __future__ import annotations

import grpc
import pytest

pytest.importorskip("starlette")

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_serving import NO_RETRY, begun, held, in_loop, until
from serving_both import serving_both

from ortolan.client.aio import AsyncClient
from ortolan.errors import EngineError, UsageError
from ortolan.runtime.serve.config import ServeConfig

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@in_loop
async def test_step_that_hangs_makes_the_server_not_ready_until_it_ends() -> None:
    """vllm#39863: an open port before an engine that hangs is a trap for every request."""
    async with (
        serving_both() as both,
        AsyncClient(both.grpc, retry=NO_RETRY) as client,
        grpc.aio.insecure_channel(both.grpc) as channel,
    ):
        both.service._heartbeat_timeout_s = 0.3
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stream = await begun(both.service, client)
        await held(both.service)
        while (await watch.read()).status != NOT_SERVING:
            pass
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        status, _, body = await both.call("/health/ready")
        assert (status, "does not move" in body) == (503, True)
        assert (await both.call("/health/live"))[0] == 200  # a restart is another matter
        _, _, metrics = await both.call("/metrics")
        assert "ortolan_ready 0.0" in metrics
        assert await both.completion() == 503
        both.service.gate.open()
        events = [event async for event in stream]
        assert events[-1].finish_reason == "length"
        while (await watch.read()).status != SERVING:
            pass
        assert (await both.call("/health/ready"))[0] == 200
        assert await both.completion() == 200
        watch.cancel()


@in_loop
async def test_idle_server_stays_ready_however_long_it_idles() -> None:
    """Nobody asks at night; an engine that has nothing to do does not hang."""
    async with serving_both() as both:
        both.service._heartbeat_timeout_s = 0.0
        both.service._engine.heartbeat_s -= 3600
        assert (await both.call("/health/ready"))[0] == 200


@in_loop
async def test_engine_that_died_is_told_apart_from_one_that_hangs() -> None:
    """The one is waited for, the other is restarted."""
    async with serving_both() as both, AsyncClient(both.grpc, retry=NO_RETRY) as client:
        both.service._engine._tell(lambda: both.service._engine._engine.stop("gone"))
        await until(lambda: both.service.not_ready is not None)
        status, _, body = await both.call("/health/ready")
        assert (status, "stopped working: gone" in body) == (503, True)
        with pytest.raises(EngineError):
            await client.generate([5], max_tokens=1)


@pytest.mark.parametrize("seconds", [0.5, -1, float("nan"), 1e9])
def test_timeout_that_would_make_every_server_sick_is_refused(seconds: float) -> None:
    """An idle engine shows life once a second only."""
    with pytest.raises(UsageError, match="heartbeat_timeout is"):
        ServeConfig(heartbeat_timeout=seconds)
