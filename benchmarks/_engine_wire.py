"""The engine in this process, loaded by the same clients as a server."""

from __future__ import annotations

import time
from pathlib import Path

from ortolan.bench.serving.grpc_wire import EventsReply
from ortolan.bench.serving.load import LoadRequest, ServePlan
from ortolan.bench.serving.outcome import ERROR, Lost, Reply
from ortolan.errors import OrtolanError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.params import EngineConfig, Request
from ortolan.runtime.serve.service import Service


class EngineWire:
    """Requests straight to the AsyncEngine: no server, no connection, prompts encoded before."""

    def __init__(self, bundle: Path, threads: int) -> None:
        self._service = Service(
            Bundle.open(bundle), EngineConfig(threads=threads, prefix_cache_mb=0)
        )
        self._ids: dict[str | tuple[int, ...], list[int]] = {}

    async def prepare(self, plan: ServePlan) -> None:
        """Encode all prompts of a plan, so that the engine alone is timed."""
        rounds = [plan.warm_up_round(), *(plan.round(turn) for turn in range(plan.repeat))]
        for request in (one for requests in rounds for one in requests):
            self._ids[request.prompt] = await self._service.encode(request.prompt)

    async def send(self, request: LoadRequest) -> Reply:
        reply = EventsReply()
        params = self._service.params(
            max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True
        )
        try:
            stream = await self._service.submit(Request(self._ids[request.prompt], params))
            async for event in stream:
                reply.events.append((time.perf_counter(), event))
        except OrtolanError as error:
            return Lost(ERROR, str(error), time.perf_counter())
        reply.end_s = time.perf_counter()
        return reply

    async def close(self) -> None:
        """Nothing: the engine is used for several comparisons; see `stop`."""

    async def stop(self) -> None:
        """End the engine."""
        await self._service.close()
