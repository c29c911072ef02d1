"""Engines side by side: which of them gets a request, and that the answer is the same."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from async_requests import hold, in_loop, read, request, slow_down, tokens
from mock_engine import NAN, mock_engine

from ortolan.errors import EngineError, OverloadedError, RequestError
from ortolan.runtime.engine.async_engine import AsyncEngine, Work
from ortolan.runtime.engine.replicas import Replicas, total_stats
from ortolan.runtime.params import Request, SamplingParams


@asynccontextmanager
async def side_by_side(
    count: int = 2, **settings: Any
) -> AsyncIterator[tuple[Replicas, list[AsyncEngine]]]:
    """Replicas that take their time; at the end nothing may be left to do."""
    engines = [AsyncEngine(mock_engine(**settings)[0]) for _ in range(count)]
    for engine in engines:
        slow_down(engine)
    replicas = Replicas(engines)
    try:
        yield replicas, engines
    finally:
        await replicas.close()
        assert [engine.work for engine in engines] == [Work(0, 0)] * count


def beginning(first: int, length: int) -> Request:
    """A prompt that shares no block with one of another `first`."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    return Request([5 + (first + i) % 40 for i in range(length)], params)


@in_loop
async def test_answers_are_those_of_one_engine_and_all_engines_work() -> None:
    requests = [request(4 + i % 7, n=1 + i % 2) for i in range(12)]
    async with side_by_side(1) as (_, (alone,)):
        expected = [await read(await alone.submit(one)) for one in requests]
    async with side_by_side(3) as (replicas, engines):
        streams = [await replicas.submit(one) for one in requests]
        found = await asyncio.gather(*map(read, streams))
        assert all(engine.stats().completion_tokens > 0 for engine in engines)
    for one, other in zip(expected, found, strict=True):
        for choice in (0, 1):
            assert tokens(one, choice) == tokens(other, choice)


@in_loop
async def test_a_request_goes_where_least_is_to_be_read() -> None:
    """Behind a long prompt it would wait for all of that."""
    async with side_by_side() as (replicas, (first, second)):
        go_on = [hold(engine) for engine in (first, second)]
        streams = [await replicas.submit(request(60))]
        assert first.work == Work(1, 60)
        streams += [await replicas.submit(request(9)) for _ in range(2)]
        assert second.work == Work(2, 18)
        streams += [await replicas.submit(request(40)), await replicas.submit(request(5))]
        assert (first.work, second.work) == (Work(2, 65), Work(3, 58))
        for release in go_on:
            release()
        await asyncio.gather(*map(read, streams))


@in_loop
async def test_running_answers_are_spread_when_nothing_is_to_be_read() -> None:
    async with side_by_side() as (replicas, engines):
        streams = [await replicas.submit(request(4, max_tokens=40)) for _ in range(6)]
        for stream in streams:
            await anext(stream)  # its prompt has been read
        assert [engine.work for engine in engines] == [Work(3, 0)] * 2
        for stream in streams:
            stream.cancel()


@in_loop
async def test_a_prompt_goes_where_its_beginning_was_read() -> None:
    """A conversation's next turn finds the KV of earlier ones; another prompt goes elsewhere."""
    async with side_by_side(prefix_blocks=16) as (replicas, engines):
        for _ in range(3):
            await read(await replicas.submit(beginning(0, 70)))
        assert [engine.stats().prompt_tokens > 0 for engine in engines] == [True, False]
        assert replicas.stats().prefix_hit_tokens == 2 * 64
        held = [await replicas.submit(beginning(0, 70)), await replicas.submit(beginning(20, 70))]
        await asyncio.gather(*map(read, held))
        assert engines[1].stats().prompt_tokens == 70


@in_loop
async def test_a_beginning_is_not_worth_any_wait() -> None:
    async with side_by_side(prefix_blocks=16) as (replicas, engines):
        await read(await replicas.submit(beginning(0, 36)))
        release = hold(engines[0])
        streams = [await engines[0].submit(beginning(20, 80))]
        streams.append(await replicas.submit(beginning(0, 36)))
        assert engines[0].work == Work(1, 80)
        release()
        await asyncio.gather(*map(read, streams))


@in_loop
async def test_salts_and_forgotten_beginnings_are_not_looked_for() -> None:
    """An engine whose cache has room for two blocks has not kept the first prompt."""
    async with side_by_side(prefix_blocks=2) as (replicas, engines):
        salted = dataclasses.replace(beginning(0, 34), salt="a tenant")
        for one in (beginning(0, 34), salted, beginning(0, 34)):
            await read(await replicas.submit(one))
        assert replicas.stats().prefix_hit_tokens == 0
        assert engines[0].stats().prefix_blocks == 2


@in_loop
async def test_a_full_queue_sends_to_the_next_engine_and_then_away() -> None:
    settings: dict[str, Any] = {"slots": 1, "max_waiting": 1}
    async with side_by_side(**settings) as (replicas, engines):
        held = [await replicas.submit(request(4, max_tokens=60)) for _ in range(2)]
        for stream in held:
            await anext(stream)
        # The first has the shorter queue by tokens, and no room.
        held += [await engines[0].submit(request(2, max_tokens=60))]
        held += [await engines[1].submit(request(40, max_tokens=5))]
        with pytest.raises(OverloadedError, match="waiting"):
            await replicas.submit(request(4))
        held[3].cancel()
        while engines[1].work.requests > 1:
            await asyncio.sleep(0.005)
        held.append(await replicas.submit(request(80)))
        assert engines[1].work.requests == 2
        for stream in held:
            stream.cancel()


@in_loop
async def test_work_is_forgotten_however_a_request_ends() -> None:
    """What is left over would keep requests away from an engine for ever."""
    async with side_by_side(1, slots=1) as (replicas, (engine,)):
        release = hold(engine)
        running = await replicas.submit(request(4, max_tokens=90))
        waiting = await replicas.submit(request(30))
        assert engine.work == Work(2, 34)
        release()
        await anext(running)
        assert engine.work == Work(2, 30)
        waiting.cancel()
        running.cancel()
        failing = await replicas.submit(Request([5, NAN, 6], SamplingParams(max_tokens=4)))
        with pytest.raises(EngineError):
            await read(failing)
        with pytest.raises(RequestError):
            await replicas.submit(Request([], SamplingParams()))
        nothing = await replicas.submit(Request([5, 6], SamplingParams(max_tokens=0)))
        assert [event.finish_reason for event in await read(nothing)] == ["length"]


def test_statistics_are_sums_and_the_first_fault() -> None:
    one, other = (mock_engine()[0].stats() for _ in range(2))
    one = dataclasses.replace(one, running=1, ended={"stop": 2}, phase_seconds={"prefill": 1.5})
    other = dataclasses.replace(
        other, running=3, ended={"stop": 1, "length": 4}, phase_seconds={"prefill": 2.0}
    )
    total = total_stats([one, dataclasses.replace(other, broken="a fuse")])
    assert (total.running, total.kv_budget_tokens) == (4, 2 * one.kv_budget_tokens)
    assert total.ended == {"stop": 3, "length": 4}
    assert total.phase_seconds["prefill"] == 3.5
    assert total.broken == "a fuse"
    assert total_stats([one, other]).broken is None


@in_loop
async def test_heartbeat_is_the_oldest_of_those_that_work() -> None:
    """An idle engine shows life once a second only; a stuck one must not hide behind another."""
    async with side_by_side() as (replicas, (first, second)):
        assert not replicas.busy
        first.heartbeat_s = second.heartbeat_s = 7.0
        assert time.monotonic() - replicas.heartbeat_s < 1.0
        stream = await replicas.submit(request(4, max_tokens=90))
        assert replicas.busy
        assert replicas.heartbeat_s == first.heartbeat_s
        stream.cancel()


@in_loop
async def test_draining_lets_all_finish_and_refuses_the_next() -> None:
    async with side_by_side() as (replicas, _):
        streams = [await replicas.submit(request(4, max_tokens=20)) for _ in range(4)]
        await replicas.drain(10)
        answers = await asyncio.gather(*map(read, streams))
        assert [len(tokens(events)) for events in answers] == [20] * 4
        with pytest.raises(EngineError, match="shutting down"):
            await replicas.submit(request(4))


@in_loop
async def test_every_engine_is_warm_before_the_first_caller() -> None:
    pytest.importorskip("grpc")
    from grpc_serving import MockService

    service = MockService()
    await service.close()
    engines = [AsyncEngine(mock_engine()[0]) for _ in range(3)]
    service._engine = Replicas(engines)
    await service.warm_up()
    assert [engine.stats().completion_tokens for engine in engines] == [2] * 3
    await service.close()
