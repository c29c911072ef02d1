"""All that one HTTP request asks of the engine, as one sequence of events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ortolan.runtime.engine.async_engine import AsyncStream
from ortolan.runtime.params import PositionLogprobs, Request, TokenEvent, Usage
from ortolan.runtime.serve.service import Service


class Answers:
    """Requests that are submitted together, read together, and given up together.

    The answers of the second prompt are numbered after those of the first, and so on.
    """

    def __init__(self, streams: Sequence[AsyncStream], n: int) -> None:
        self._streams = streams
        self._n = n
        self._ready: deque[tuple[int, TokenEvent]] = deque()
        self._reading: dict[asyncio.Task[TokenEvent], int] = {}
        if len(streams) > 1:
            for prompt in range(len(streams)):
                self._read(prompt)

    @classmethod
    async def start(cls, service: Service, requests: Sequence[Request]) -> Answers:
        """Submit all of them, or none. Raises what `Service.submit` does."""
        streams: list[AsyncStream] = []
        try:
            for request in requests:
                streams.append(await service.submit(request))  # noqa: PERF401  what was submitted must be known if one is refused
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return cls(streams, requests[0].params.n)

    async def next(self) -> tuple[int, TokenEvent] | None:
        """An answer's number and what it has grown by; None after the last.

        Raises the error of the first request that fails.
        """
        if len(self._streams) == 1:
            try:
                event = await self._streams[0].__anext__()
            except StopAsyncIteration:
                return None
            return event.choice, event
        while not self._ready:
            if not self._reading:
                return None
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._take(task)
        return self._ready.popleft()

    def cancel(self) -> None:
        """Give every slot back within one step; harmless after the end."""
        for stream in self._streams:
            stream.cancel()
        for task in self._reading:
            task.cancel()

    def _read(self, prompt: int) -> None:
        self._reading[asyncio.create_task(self._streams[prompt].__anext__())] = prompt

    def _take(self, task: asyncio.Task[TokenEvent]) -> None:
        prompt = self._reading.pop(task)
        try:
            event = task.result()
        except StopAsyncIteration:
            return
        self._ready.append((prompt * self._n + event.choice, event))
        self._read(prompt)


@dataclass
class Answer:
    """One answer, collected."""

    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, event: TokenEvent) -> None:
        """What it has grown by."""
        self.texts.append(event.text)
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.finish_reason = event.finish_reason or self.finish_reason


class Total:
    """The usage of all answers; a prompt counts once, however many answers it has."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0

    def add(self, number: int, usage: Usage | None) -> None:
        """The usage on an answer's last event."""
        if usage is None:
            return
        self.completion_tokens += usage.completion_tokens
        if number % self._n == 0:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens

    @property
    def as_json(self) -> str:
        """OpenAI's usage object."""
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},'
            f'"completion_tokens":{self.completion_tokens},'
            f'"total_tokens":{self.prompt_tokens + self.completion_tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.cached_tokens}}}}}'
        )
