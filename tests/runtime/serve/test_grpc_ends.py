"""However a call ends, its slots are free within one step, and its stream has an end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_serving import (
    LONG,
    NO_RETRY,
    PROMPT,
    MockService,
    begun,
    held,
    in_loop,
    mock_serving,
    serving,
    until,
)

from ortolan.client.aio import AsyncClient
from ortolan.client.types import Event
from ortolan.errors import CancelledError, EngineError, OrtolanError, TimedOutError


async def _freed_within_a_step(service: MockService) -> None:
    """The engine is held in a step: what ends must be on its way, and be gone after that step."""
    await until(lambda: service.told)
    passed = service.gate.passed
    service.gate.step()
    await until(lambda: service.stats().running == 0 and service.stats().waiting == 0)
    assert service.gate.passed == passed + 1


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
@in_loop
async def test_call_that_its_client_leaves_frees_every_choice_within_a_step(how: str) -> None:
    """llama.cpp#24496, vllm#14326: a client that goes away must not hold slots."""
    async with mock_serving() as (service, client):
        stream = await begun(service, client, n=3)
        assert service.stats().running == 3
        await (stream.aclose() if how == "cancel" else client.close())
        await _freed_within_a_step(service)
        assert service.stats().ended["cancelled"] == 3


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
@in_loop
async def test_call_that_waits_and_is_left_never_runs(how: str) -> None:
    """A waiting request has no event to write: nothing but the cancellation tells of its client."""
    async with mock_serving(slots=1) as (service, client):
        first = await begun(service, client)
        other = AsyncClient(client.address, retry=NO_RETRY)
        waiting = asyncio.create_task(anext(other.stream(PROMPT, n=3, **LONG)))
        # The engine takes requests between steps only.
        await until(lambda: service.told)
        service.gate.step()
        await until(lambda: service.stats().waiting == 3)
        await held(service)
        if how == "cancel":
            waiting.cancel()
        await other.close()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: service.told)
        service.gate.step()
        await until(lambda: service.stats().waiting == 0)
        assert service.stats().running == 1
        await first.aclose()
        await _freed_within_a_step(service)


@in_loop
async def test_call_that_is_left_while_it_is_submitted_leaves_nothing() -> None:
    """The moments before the first event are those that tests forget and clients do not."""
    async with mock_serving() as (service, client):
        for delay in range(30):
            task = asyncio.create_task(anext(client.stream(PROMPT, **LONG)))
            for _ in range(3 * delay):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not service._engine.busy)


@pytest.mark.parametrize("n", [1, 3])
@in_loop
async def test_deadline_frees_every_choice_of_a_running_call(n: int) -> None:
    """vllm#14326: an expired deadline is nobody's stream any more."""
    async with mock_serving() as (service, client):
        service.hold()
        stream = client.stream(PROMPT, n=n, timeout_s=0.4, **LONG)

        async def read() -> None:
            async for _ in stream:
                service.gate.step()

        with pytest.raises(TimedOutError):
            await read()
        service.gate.open()
        await until(lambda: not service._engine.busy)
        ended = service.stats().ended
        assert ended.get("timed out", 0) + ended.get("cancelled", 0) == n


@in_loop
async def test_deadline_ends_a_call_that_waits() -> None:
    """Nothing waits longer than it was told to."""
    async with mock_serving(slots=1) as (service, client):
        first = await begun(service, client)
        with pytest.raises(TimedOutError):
            await client.generate(PROMPT, n=2, timeout_s=0.2, **LONG)
        service.gate.open()
        async for _ in first:
            pass
        await until(lambda: not service._engine.busy)
        assert service.stats().ended["length"] == 1


@in_loop
async def test_deadline_reaches_the_engine_itself() -> None:
    """The engine ends what is late also where gRPC would not tell it: no stream outlives it."""
    async with mock_serving() as (service, client):
        asked = []
        submit = service.submit

        async def noted(request: Any) -> Any:
            asked.append(request)
            return await submit(request)

        service.submit = noted  # type: ignore[method-assign]
        await client.generate(PROMPT, timeout_s=30, max_tokens=1)
        await client.generate(PROMPT, max_tokens=1)
        assert 20 < asked[0].timeout_s < 31  # gRPC rounds what it sends
        assert asked[1].timeout_s is None


CHILD = """
import sys
from ortolan.client.sync import Client
for event in Client(sys.argv[1]).stream([5, 6, 7, 8], max_tokens=80, ignore_eos=True, n=3):
    print(event, flush=True)
"""


@in_loop
async def test_killed_client_process_frees_its_slots_within_a_step() -> None:
    """SIGKILL gives no time to say goodbye; the closed connection has to be enough."""
    service = MockService()
    async with serving(service) as address:
        service.hold()
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", CHILD, address, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        try:
            for _ in range(2):
                await held(service)
                service.gate.step()
            assert await child.stdout.readline()
            await until(lambda: service.stats().running == 3)
            await held(service)
        finally:
            child.send_signal(signal.SIGKILL)
            await child.wait()
        await _freed_within_a_step(service)


@in_loop
async def test_every_stream_of_a_failing_engine_ends_with_an_error() -> None:
    """vllm#52852: nobody waits for an engine that has died."""
    async with mock_serving() as (service, client):
        streams = [await begun(service, client) for _ in range(3)]
        service.model.broken = True
        service.gate.open()

        async def read(stream: AsyncIterator[Event]) -> None:
            async for _ in stream:
                pass

        results = await asyncio.gather(*map(read, streams), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results), results


@in_loop
async def test_stream_that_ends_well_has_a_finish_reason_and_usage_for_each_choice() -> None:
    """A client that sees the end of a stream knows that it has the whole answer."""
    async with mock_serving() as (_, client):
        ends = [e async for e in client.stream(PROMPT, n=4, **LONG) if e.finish_reason]
        assert sorted(event.choice for event in ends) == [0, 1, 2, 3]
        assert all(event.usage is not None for event in ends)


@in_loop
async def test_draining_lets_streams_end_and_turns_new_calls_away() -> None:
    """vllm#34730: SIGTERM ends no answer that its time allows."""
    async with mock_serving() as (service, client):
        stream = await begun(service, client)
        service.gate.open()
        draining = asyncio.create_task(service.drain(20))
        await until(lambda: service._draining)
        with pytest.raises(EngineError, match="shutting down"):
            await client.generate(PROMPT, max_tokens=1)
        assert [event async for event in stream][-1].finish_reason == "length"
        await draining


@in_loop
async def test_stream_cut_off_by_a_shutdown_is_told_so() -> None:
    """It did not cancel: it may ask another server, or this one when it is back."""
    async with mock_serving() as (service, client):
        stream = await begun(service, client)
        draining = asyncio.create_task(service.drain(0))
        await until(lambda: service._engine._closing)
        service.gate.open()
        with pytest.raises(OrtolanError) as caught:
            [event async for event in stream]
        assert isinstance(caught.value, EngineError)
        assert not isinstance(caught.value, CancelledError)
        await draining


@in_loop
async def test_calls_with_one_request_id_do_not_meet() -> None:
    """vllm#10583: an id that a client chose is a name in logs, not a key."""
    async with mock_serving() as (service, client):
        alone = (await client.generate(PROMPT, **LONG))[0].token_ids
        one = await begun(service, client, request_id="same")
        service.gate.open()
        other = client.generate([9, 9, 9], request_id="same", **LONG)
        both = await asyncio.gather(other, client.generate(PROMPT, request_id="same", **LONG))
        assert both[1][0].token_ids == alone
        assert both[0][0].token_ids != alone
        rest = [token_id async for event in one for token_id in event.token_ids]
        assert tuple(rest) == alone[-len(rest) :]
