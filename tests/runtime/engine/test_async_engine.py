"""The engine for coroutines: streams, slow readers, cancellation, shutting down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from async_requests import in_loop, read, request, slow_down, tokens
from mock_engine import mock_engine

from ortolan.errors import (
    CancelledError,
    EngineError,
    OverloadedError,
    RequestError,
    TimedOutError,
)
from ortolan.runtime.engine.async_engine import AsyncEngine
from ortolan.runtime.params import Request


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[AsyncEngine, Any]]:
    engine, model = mock_engine(**settings)
    front = AsyncEngine(engine)
    try:
        yield front, model
    finally:
        await front.close()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)


@in_loop
async def test_streams_run_side_by_side() -> None:
    async with running() as (front, _):
        streams = [await front.submit(request(4 + i, n=2)) for i in range(9)]
        answers = await asyncio.gather(*map(read, streams))
        for events in answers:
            assert len(tokens(events, 0)) == len(tokens(events, 1)) == 8
            assert events[-1].finish_reason == "length"
        assert front.stats().ended == {"length": 18}


@in_loop
async def test_slow_reader_holds_few_events_and_loses_nothing() -> None:
    """vllm#56094: output that nobody reads must not pile up, nor slow the others."""
    async with running() as (front, _):
        slow = await front.submit(request(4, max_tokens=80, n=2))
        await read(await front.submit(request(4, max_tokens=80)))
        while front.busy:
            await asyncio.sleep(0.001)
        assert len(slow._unread) <= 34
        events = await read(slow)
        reference = await read(await front.submit(request(4, max_tokens=80)))
        assert tokens(events, 0) == tokens(events, 1) == tokens(reference)
        assert [e.finish_reason for e in events if e.finish_reason] == ["length"] * 2


@in_loop
async def test_first_token_does_not_wait_for_the_step_that_made_it() -> None:
    """The step still decodes all running rows, which takes longer than to read a short prompt."""
    async with running() as (front, _):
        was_read, in_time = threading.Event(), []
        decode = front._engine._decode.run

        def waits_for_the_reader(*, beside_prompt: bool) -> None:
            if beside_prompt:
                in_time.append(was_read.wait(timeout=5))
            decode(beside_prompt=beside_prompt)

        front._engine._decode.run = waits_for_the_reader  # type: ignore[method-assign]
        stream = await front.submit(request(4, n=2))
        assert {(await anext(stream)).choice, (await anext(stream)).choice} == {0, 1}
        was_read.set()
        await read(stream)
        assert in_time == [True]


@in_loop
async def test_cancelled_stream_ends_with_an_error() -> None:
    """Every stream ends with a finish reason or an error (vllm#52852)."""
    async with running() as (front, _):
        slow_down(front)
        stream = await front.submit(request(4, max_tokens=80))
        await anext(stream)
        stream.cancel()
        stream.cancel()
        with pytest.raises(CancelledError):
            await read(stream)
        other = await read(await front.submit(request(4)))
        assert len(other) == 8
        stream.cancel()  # after the end, too


@in_loop
async def test_caller_that_goes_away_while_submitting_leaves_nothing() -> None:
    """grpc#43360: a call cancelled at any moment must not hold a slot."""
    async with running() as (front, _):
        for delay in range(20):
            task = asyncio.create_task(front.submit(request(4, max_tokens=80)))
            for _ in range(delay):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                task.result().cancel()
        for _ in range(2000):
            if not front.busy:
                break
            await asyncio.sleep(0.001)
        assert not front.busy


@in_loop
async def test_refusals_reach_the_caller() -> None:
    async with running(slots=1, max_waiting=1) as (front, _):
        with pytest.raises(RequestError, match="empty"):
            await front.submit(request(0))
        late = await front.submit(request(4, max_tokens=80, timeout_s=0.05))
        with pytest.raises(TimedOutError, match=r"0\.05 s"):
            await read(late)
        # One runs, one waits, a third is too many, unless the first has ended by then.
        submitted = [front.submit(request(4, max_tokens=80)) for _ in range(50)]
        results = await asyncio.gather(*submitted, return_exceptions=True)
        assert any(isinstance(result, OverloadedError) for result in results)
        for result in results:
            if not isinstance(result, BaseException):
                result.cancel()


@in_loop
async def test_draining_lets_streams_finish_and_refuses_new_ones() -> None:
    """vllm#34730: no new work, running streams go on."""
    async with running() as (front, _):
        stream = await front.submit(request(4, max_tokens=80))
        draining = asyncio.create_task(front.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="shutting down"):
            await front.submit(request(4))
        assert len(tokens(await read(stream))) == 80
        await draining


@in_loop
async def test_draining_ends_what_takes_too_long_with_an_error() -> None:
    async with running(slots=1) as (front, model):
        gate, decode = threading.Event(), model.decode

        def decode_at_the_gate(*args: Any) -> Any:
            gate.wait(10)
            return decode(*args)

        model.decode = decode_at_the_gate
        stream = await front.submit(request(4, max_tokens=90))
        draining = asyncio.create_task(front.drain(0))
        while not front._closing:
            await asyncio.sleep(0)
        gate.set()  # the step that was running ends; the request has not
        await draining
        with pytest.raises(CancelledError, match="closed"):
            await read(stream)


@in_loop
async def test_a_fault_of_ours_ends_every_stream_with_the_reason() -> None:
    """vllm#52852: nobody waits for an engine that has died."""
    async with running() as (front, model):
        slow_down(front)
        stream = await front.submit(request(4, max_tokens=80))
        model.decode = None
        with pytest.raises(EngineError, match="TypeError"):
            await read(stream)
        assert "TypeError" in (front.stats().broken or "")
        with pytest.raises(EngineError, match="TypeError"):
            await front.submit(request(4))


@in_loop
async def test_a_request_that_cannot_even_be_queued_ends_alone() -> None:
    """A fault while one request is set up must reach its caller, and leave the thread alive."""
    async with running() as (front, _):
        stream = await front.submit(request(4, max_tokens=80))
        submit, front._engine.submit = front._engine.submit, None  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineError, match="TypeError"):
            await front.submit(request(4))
        front._engine.submit = submit  # type: ignore[method-assign]
        assert len(tokens(await read(stream))) == 80
        assert len(tokens(await read(await front.submit(request(4))))) == 8


@in_loop
async def test_a_fault_that_even_stopping_does_not_survive_ends_every_stream() -> None:
    """vllm#52852: whatever is broken, nobody waits for ever."""
    async with running() as (front, model):
        slow_down(front)
        stream = await front.submit(request(4, max_tokens=80))
        stop, front._engine.stop = front._engine.stop, None  # type: ignore[method-assign,assignment]
        model.decode = None
        with pytest.raises(EngineError, match="TypeError"):
            await read(stream)
        with pytest.raises(EngineError, match="TypeError"):
            await front.submit(request(4))
        stop("cleared for the test")


@in_loop
async def test_submitting_from_another_loop_while_closing_never_hangs() -> None:
    """The check and the hand-over are two steps; a close may come between, from another thread."""
    engine, _ = mock_engine()
    front = AsyncEngine(engine)
    tell = front._tell

    async def late() -> None:
        def closed_in_between(action: Callable[[], None]) -> Any:
            front._closing = True
            tell(lambda: None)
            front._thread.join()
            return tell(action)

        front._tell = closed_in_between  # type: ignore[method-assign]
        await front.submit(request(4))

    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(late(), 5)


@in_loop
async def test_draining_waits_for_a_request_that_is_being_queued() -> None:
    """Between the inbox and the streams a request would be seen nowhere."""
    async with running() as (front, _):
        submit = front._engine.submit
        busy: list[bool] = []

        def watched(asked: Request) -> Any:
            busy.append(front.busy)
            return submit(asked)

        front._engine.submit = watched  # type: ignore[method-assign]
        await read(await front.submit(request(4)))
        assert busy == [True]
    assert not front.busy


@in_loop
async def test_streams_of_a_loop_that_has_gone_give_their_slots_back() -> None:
    """Nobody is left to read or to cancel them."""
    async with running() as (front, _):

        def elsewhere() -> None:
            async def leave() -> None:
                await front.submit(request(4, max_tokens=90))

            asyncio.run(leave())

        slow_down(front)
        await asyncio.to_thread(elsewhere)
        while front.busy:
            await asyncio.sleep(0.005)
        assert front.stats().ended == {"cancelled": 1}
