"""Completions over gRPC, by Ortolan's own client, whose events are kept and read later."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ortolan.bench.serving.load import LoadRequest
from ortolan.bench.serving.outcome import NO_FINISH, Lost, Outcome, Reply
from ortolan.errors import OrtolanError

if TYPE_CHECKING:
    from ortolan.client.access import AccessSettings


@dataclass
class EventsReply:
    """A stream of events of ours (the client's, or the engine's), and when each arrived."""

    events: list[tuple[float, Any]] = field(default_factory=list)
    end_s: float = 0.0

    def outcome(self) -> Outcome:
        last = self.events[-1][1] if self.events else None
        if last is None or last.finish_reason is None:
            return Outcome(self.end_s, lost=NO_FINISH, detail=f"{len(self.events)} events")
        times_s = [arrived_s for arrived_s, event in self.events if event.token_ids]
        counted = sum(len(event.token_ids) for _, event in self.events)
        return Outcome(
            self.end_s,
            first_s=times_s[0] if times_s else self.end_s,
            last_s=times_s[-1] if times_s else self.end_s,
            tokens=counted if last.usage is None else last.usage.completion_tokens,
            from_usage=last.usage is not None,
            finish_reason=last.finish_reason,
        )


class GrpcWire:
    """A channel to one of our servers, at host:port."""

    def __init__(
        self, address: str, ignore_eos: bool = False, access: AccessSettings | None = None
    ) -> None:
        from ortolan.client.aio import AsyncClient
        from ortolan.client.calls import RetryPolicy

        # A request that is turned away is lost here, not sent again in silence.
        self._client = AsyncClient(address, retry=RetryPolicy(max_retries=0), **(access or {}))
        self._more: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}

    async def greet(self) -> Any:
        """What is served. Raises OrtolanError."""
        return (await self._client.models(timeout_s=10))[0]

    async def send(self, request: LoadRequest) -> Reply:
        reply = EventsReply()
        stream = self._client.stream(
            request.prompt, max_tokens=request.max_tokens, temperature=0.0, **self._more
        )
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    reply.events.append((time.perf_counter(), event))
        except OrtolanError as error:
            return Lost(type(error).__name__, str(error), time.perf_counter())
        reply.end_s = time.perf_counter()
        return reply

    async def close(self) -> None:
        await self._client.close()
