"""Makes the load of one round: a closed loop of clients, or requests at their times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ortolan.bench.serving.load import LoadRequest
from ortolan.bench.serving.outcome import TIMED_OUT, Lost, Outcome, Reply, Wire


@dataclass(frozen=True)
class Answered:
    """A request and what became of it, in seconds.

    due_s: when it should have been sent, from which its times count: a request that had to wait
    in the client has waited for the server all the same. sent_s: when it was.
    """

    request: LoadRequest
    due_s: float
    sent_s: float
    outcome: Outcome


@dataclass(frozen=True)
class Round:
    """One round on one server. client_s: processor time that making the load took."""

    answers: list[Answered]
    client_s: float

    @property
    def whole(self) -> list[Answered]:
        """The requests that were not lost."""
        return [one for one in self.answers if one.outcome.lost is None]

    @property
    def seconds(self) -> float:
        """From the first request that was due to the last end."""
        return max(one.outcome.end_s for one in self.answers) - min(
            one.due_s for one in self.answers
        )


@dataclass(frozen=True)
class _Unread:
    request: LoadRequest
    due_s: float
    sent_s: float
    reply: Reply


async def closed_loop(
    wire: Wire, requests: Sequence[LoadRequest], clients: int, timeout_s: float
) -> Round:
    """`clients` take the next request as soon as they have the answer to their last one."""
    left, unread, began_s = iter(requests), list[_Unread](), time.process_time()

    async def client() -> None:
        for request in left:
            sent_s = time.perf_counter()
            reply = await _send(wire, request, timeout_s)
            unread.append(_Unread(request, sent_s, sent_s, reply))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(requests))):
            group.create_task(client())
    return _read(unread, time.process_time() - began_s)


async def open_loop(
    wire: Wire, requests: Sequence[LoadRequest], arrivals_s: Sequence[float], timeout_s: float
) -> Round:
    """Every request at its time, in seconds after the begin, however many are unanswered."""
    unread, began_s, zero_s = list[_Unread](), time.process_time(), time.perf_counter()

    async def one(request: LoadRequest, due_s: float) -> None:
        sent_s = time.perf_counter()
        reply = await _send(wire, request, timeout_s)
        unread.append(_Unread(request, due_s, sent_s, reply))

    async with asyncio.TaskGroup() as group:
        for request, arrival_s in zip(requests, arrivals_s, strict=True):
            due_s = zero_s + arrival_s
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            group.create_task(one(request, due_s))
    return _read(unread, time.process_time() - began_s)


async def _send(wire: Wire, request: LoadRequest, timeout_s: float) -> Reply:
    try:
        async with asyncio.timeout(timeout_s):
            return await wire.send(request)
    except TimeoutError:
        return Lost(TIMED_OUT, f"no end after {timeout_s:g} s", time.perf_counter())


def _read(unread: Sequence[_Unread], client_s: float) -> Round:
    """The replies read, now that nobody is kept waiting."""
    return Round(
        [Answered(one.request, one.due_s, one.sent_s, one.reply.outcome()) for one in unread],
        client_s,
    )
