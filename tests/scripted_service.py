"""A service whose streams a test writes: what the engine does, without the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ortolan.errors import OrtolanError
from ortolan.runtime.engine.async_engine import AsyncStream
from ortolan.runtime.params import Request, SamplingParams, TokenEvent
from ortolan.runtime.serve.calls import Call
from ortolan.runtime.serve.metrics import Metrics
from ortolan.runtime.text.no_tokenizer import NoTokenizer

Step = TokenEvent | OrtolanError
Script = Callable[[Request], Sequence[Step]]


class ScriptedService:
    """Each request's stream has what `script` gives: events, then perhaps the error it ends with.

    Without an error and a finish reason at the script's end, the stream stays open until it is
    cancelled. `cancelled` counts streams that were.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.name = "scripted"
        self.created_s = 1
        self.context = 64
        self.manifest = SimpleNamespace(model=SimpleNamespace(vocab_size=100))
        self.bundle = SimpleNamespace(path="/nowhere")
        self.tokenizer = NoTokenizer({})
        self.not_ready: str | None = None
        self.cancelled = 0
        self.streams: list[AsyncStream] = []
        self.metrics = Metrics(
            model=self.name,
            provider="none",
            onnxruntime="none",
            stats=lambda: None,  # type: ignore[arg-type, return-value]
            not_ready=lambda: self.not_ready,
        )

    def open_call(self, protocol: Any, request_id: str, headers: Any) -> Call:
        return Call(protocol, request_id, headers, model=self.name, metrics=self.metrics)

    def params(self, **given: Any) -> SamplingParams:
        return SamplingParams(**given)

    async def encode(self, prompt: Any) -> list[int]:
        return [5] if isinstance(prompt, str) else list(prompt)

    async def encode_chat(self, messages: Any) -> list[int]:
        return [5]

    def check_ready(self) -> None:
        return None

    async def submit(self, request: Request) -> AsyncStream:
        def cancel() -> None:
            self.cancelled += stream in self.streams
            if stream in self.streams:
                self.streams.remove(stream)

        steps = self.script(request)
        stream = AsyncStream(asyncio.get_running_loop(), cancel)
        self.streams.append(stream)
        for step in steps:
            if isinstance(step, TokenEvent):
                stream.put(step)
            else:
                self.finish(stream, step)
        if steps and isinstance(steps[-1], TokenEvent) and steps[-1].finish_reason:
            self.finish(stream, None)
        return stream

    def finish(self, stream: AsyncStream, error: OrtolanError | None) -> None:
        """The stream's end, which a later cancel does not count."""
        stream.end(error)
        stream.tell()
        self.streams.remove(stream)
