"""Requests to an AsyncEngine on the mock model, and what reads their answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ortolan.runtime.engine.async_engine import AsyncEngine
from ortolan.runtime.params import Request, SamplingParams, TokenEvent


def request(length: int, max_tokens: int = 8, **settings: Any) -> Request:
    ids = [5 + i % 40 for i in range(length)]
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, n=settings.pop("n", 1)
    )
    return Request(ids, params, **settings)


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Runs a coroutine as a test, which may take at most 20 s."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run


def slow_down(front: AsyncEngine, step_s: float = 0.01) -> None:
    """The mock would be through with an answer before its reader has had a turn."""
    decode = front._engine._decode.run

    def slow(*, beside_prompt: bool) -> None:
        time.sleep(step_s)
        decode(beside_prompt=beside_prompt)

    front._engine._decode.run = slow  # type: ignore[method-assign]


async def read(stream: AsyncIterator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in stream]


def tokens(events: list[TokenEvent], choice: int = 0) -> list[int]:
    return [i for event in events if event.choice == choice for i in event.token_ids]


def hold(front: AsyncEngine) -> Callable[[], None]:
    """Have the engine take requests and do nothing for them, until what is returned is called."""
    step, gate = front._engine.step, threading.Event()

    def held() -> bool:
        if gate.is_set():
            return step()
        time.sleep(0.001)
        return True

    front._engine.step = held  # type: ignore[method-assign]
    return gate.set
