"""Engines side by side in one process: each request goes to the one that is done with it first.

Two threads that compute one product together exchange what they have written at every operator,
which takes long where their cores share no cache; two engines on a thread each exchange nothing.
They share the packed weights, which are mapped from one file.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import fields

from ortolan.errors import OverloadedError
from ortolan.runtime.engine.async_engine import AsyncEngine, AsyncStream, OnEnd
from ortolan.runtime.engine.engine import EngineStats
from ortolan.runtime.engine.prefix_cache import BLOCK
from ortolan.runtime.params import Request

# A running answer delays a prompt about as much as so many more of its tokens: every step that
# comes between takes longer.
_ANSWER_TOKENS = 16


class Replicas:
    """Engines behind the interface of one; see AsyncEngine.

    A request goes where the least is to be done before its first token: what waits to be read
    there, its own prompt but for what that engine has read before, and something for each answer.
    Whichever it is, the answer is the same, bit for bit.
    """

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        self.engines = engines
        self._read = [_ReadBefore(engine.stats().prefix_capacity_blocks) for engine in engines]

    async def submit(self, request: Request, on_end: OnEnd | None = None) -> AsyncStream:
        """Queue a request; its stream. Raises what `AsyncEngine.submit` does.

        OverloadedError: no engine has room.
        """
        blocks = _blocks(request) if any(read.capacity for read in self._read) else []
        refused: OverloadedError | None = None
        for index in self._by_work(request, blocks):
            try:
                stream = await self.engines[index].submit(request, on_end)
            except OverloadedError as error:
                refused = refused or error
                continue
            self._read[index].add(blocks)
            return stream
        assert refused is not None
        raise refused

    def _by_work(self, request: Request, blocks: Sequence[int]) -> list[int]:
        """The engines' indices, the one with the least to do first."""

        def tokens(index: int) -> int:
            work = self.engines[index].work
            known = min(self._read[index].matching(blocks) * BLOCK, len(request.prompt_ids))
            return work.unread_tokens + _ANSWER_TOKENS * work.requests - known

        return sorted(range(len(self.engines)), key=tokens)

    def stats(self) -> EngineStats:
        """Sums over the engines; `broken` is the first one's that is."""
        return total_stats([engine.stats() for engine in self.engines])

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return any(engine.busy for engine in self.engines)

    @property
    def heartbeat_s(self) -> float:
        """The oldest sign of life of an engine that has work; now, where none has any."""
        beats = [engine.heartbeat_s for engine in self.engines if engine.busy]
        return min(beats, default=time.monotonic())

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing new, let running streams finish, then close."""
        await asyncio.gather(*(engine.drain(timeout_s) for engine in self.engines))

    async def close(self) -> None:
        """End every request with an error and stop the threads. Harmless a second time."""
        await asyncio.gather(*(engine.close() for engine in self.engines))


def total_stats(each: Sequence[EngineStats]) -> EngineStats:
    """The sum of several engines' statistics."""
    total: dict[str, object] = {}
    for item in fields(EngineStats):
        values = [getattr(stats, item.name) for stats in each]
        if item.name == "broken":
            total[item.name] = next((reason for reason in values if reason is not None), None)
        elif isinstance(values[0], dict):
            total[item.name] = _sums(values)
        else:
            total[item.name] = sum(values)
    return EngineStats(**total)  # type: ignore[arg-type]


def _sums(each: Sequence[dict[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for counts in each:
        total.update(counts)
    return dict(total)


class _ReadBefore:
    """Beginnings of prompts that an engine was given, as many blocks as its prefix cache holds.

    A guess at what that holds: the least recently used go first there, too.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def matching(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks it has read."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
        return len(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """A prompt goes there. Its last blocks are forgotten before its first."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)


def _blocks(request: Request) -> list[int]:
    """A hash for each whole block of the prompt, with all that comes before it."""
    ids, found = request.prompt_ids, []
    before = hash(request.salt)
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        before = hash((before, tuple(ids[start : start + BLOCK])))
        found.append(before)
    return found
