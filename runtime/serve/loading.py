"""What stands in the engine's place while the model is being loaded."""

from __future__ import annotations

import time

from ortolan.errors import EngineError
from ortolan.runtime.engine.async_engine import AsyncStream, OnEnd
from ortolan.runtime.engine.engine import EngineStats
from ortolan.runtime.params import Request

LOADING = "the model is loading"


class LoadingEngine:
    """An AsyncEngine that has done nothing, does nothing, and refuses every request."""

    busy = False

    @property
    def heartbeat_s(self) -> float:
        """Now: nothing is awaited of it."""
        return time.monotonic()

    async def submit(self, request: Request, on_end: OnEnd | None = None) -> AsyncStream:
        """Raises EngineError."""
        raise EngineError(LOADING)

    def stats(self) -> EngineStats:
        """Zeros."""
        return EngineStats(
            running=0,
            waiting=0,
            kv_tokens=0,
            kv_budget_tokens=0,
            steps=0,
            preemptions=0,
            prompt_tokens=0,
            completion_tokens=0,
            prefix_blocks=0,
            prefix_capacity_blocks=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            ended={},
            broken=None,
        )

    async def drain(self, timeout_s: float) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Nothing is held."""
