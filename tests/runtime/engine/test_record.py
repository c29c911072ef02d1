"""What is known of a request that has ended, and what steps spend their time on."""

from __future__ import annotations

import asyncio

import pytest
from engine_requests import drain, request
from mock_engine import RAISES, mock_engine

from ortolan.runtime.engine.async_engine import AsyncEngine
from ortolan.runtime.engine.record import RequestRecord, record_of


def test_record_says_what_the_models_clock_says() -> None:
    """A wrong time to first token sends an operator after the wrong fault."""
    engine, _ = mock_engine(slots=1)
    first, second = engine.submit(request(20, max_tokens=5)), engine.submit(request(30, n=2))
    drain(engine)
    # 1 ms for a prompt token, 10 ms for a step that decodes.
    assert record_of(first) == RequestRecord(
        reasons=("length",),
        prompt_tokens=20,
        cached_tokens=0,
        completion_tokens=5,
        admitted_s=0.0,
        first_token_s=pytest.approx(0.020),
        ended_s=pytest.approx(0.060),
        token_s=(pytest.approx(0.010),),
    )
    record = record_of(second)
    assert record.admitted_s == pytest.approx(0.060)
    assert record.first_token_s == pytest.approx(0.090)
    assert (record.prompt_tokens, record.completion_tokens) == (30, 16)
    assert record.reasons == ("length", "length")
    assert len(record.token_s) == 2


def test_record_of_a_request_that_did_not_come_far_has_no_times_made_up() -> None:
    """A zero in a histogram would look like a very fast answer."""
    engine, _ = mock_engine(slots=1)
    engine.submit(request(8))
    waiting, failing = engine.submit(request(8)), engine.submit(request([6, RAISES]))
    engine.step()
    engine.cancel(waiting)
    drain(engine)
    record = record_of(waiting)
    assert record.reasons == ("cancelled",)
    assert (record.admitted_s, record.first_token_s, record.token_s) == (None, None, ())
    record = record_of(failing)
    assert record.reasons == ("failed",)
    assert record.admitted_s is not None
    assert record.first_token_s is None


def test_phases_add_up_to_what_steps_took() -> None:
    """An operator reads off where the time goes; a phase that is missing would be sought long."""
    engine, model = mock_engine()
    began = model.clock.now
    engine.submit(request(20, max_tokens=5))
    assert engine.stats().phase_seconds == {"prefill": 0, "decode": 0, "sample": 0, "other": 0}
    drain(engine)
    seconds = engine.stats().phase_seconds
    assert seconds["prefill"] == pytest.approx(0.020)
    assert seconds["decode"] == pytest.approx(0.040)
    assert sum(seconds.values()) == pytest.approx(model.clock.now - began)


def test_whoever_asks_is_told_of_every_end_once() -> None:
    """A log line is owed for requests that nobody reads to their end, too."""

    async def run() -> list[RequestRecord]:
        engine, model = mock_engine()
        front = AsyncEngine(engine)
        told: list[RequestRecord] = []
        read = await front.submit(request(8), told.append)
        async for _ in read:
            pass
        assert len(told) == 1  # before the stream ends
        (await front.submit(request(8, max_tokens=80), told.append)).cancel()
        await front.submit(request(8, max_tokens=0), told.append)
        await front.submit(request(8), told.append)
        model.broken = True
        await front.submit(request(9), told.append)
        await front.close()
        await asyncio.sleep(0)
        return told

    told = asyncio.run(run())
    assert len(told) == 5
    assert told[0].reasons == ("length",)


def test_engine_that_can_do_nothing_more_still_tells_of_its_requests() -> None:
    """The requests that a fault of ours cost are those whose log lines are wanted most."""

    async def run() -> list[RequestRecord]:
        engine, _ = mock_engine()
        front = AsyncEngine(engine)
        told: list[RequestRecord] = []

        def broken(*_: object) -> None:
            raise ValueError("a fault of ours")

        engine.step = engine.stop = broken  # type: ignore[method-assign, assignment]
        stream = await front.submit(request(8), told.append)
        with pytest.raises(Exception, match="stopped working"):
            async for _ in stream:
                pass
        await front.close()
        return told

    assert [record.reasons for record in asyncio.run(run())] == [("failed",)]
