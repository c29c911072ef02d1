"""`AsyncClient`: a server from coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from ortolan.client import convert
from ortolan.client.access import Access, AccessSettings
from ortolan.client.calls import (
    CHANNEL_OPTIONS,
    READY_POLL_S,
    Attempts,
    RetryPolicy,
    error_of,
    unreachable,
    why_not_ready,
)
from ortolan.client.convert import Answers, Asked
from ortolan.client.types import Answer, Event, Messages, Model, Prompt, Settings, Stats
from ortolan.errors import EngineError
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1 import ortolan_pb2_grpc as pb_grpc


class AsyncClient:
    """A server at `address` ("host:port"), for one event loop; see `Client`.

    A stream that is left early is to be closed (`contextlib.aclosing`): since grpcio 1.83 a call
    that is only forgotten goes on until the client is closed (grpc#43462).
    """

    def __init__(
        self,
        address: str,
        *,
        retry: RetryPolicy | None = None,
        **access: Unpack[AccessSettings],
    ) -> None:
        self.address = address
        self._retry = retry or RetryPolicy()
        self._access = Access(**access)
        # Made with the first call: gRPC binds a channel to the loop that is running then.
        self._channel: Any = None
        self._stub: Any = None
        self._closed = False

    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> AsyncGenerator[Event]:
        """What a prompt's answers grow by; closing the iterator cancels the call."""
        return self._stream("Generate", convert.asked_to_generate(prompt, settings))

    def stream_chat(
        self, messages: Messages, **settings: Unpack[Settings]
    ) -> AsyncGenerator[Event]:
        """The same for the answer to a conversation."""
        return self._stream("Chat", convert.asked_to_chat(messages, settings))

    async def generate(self, prompt: Prompt, **settings: Unpack[Settings]) -> list[Answer]:
        """A prompt's `n` whole answers."""
        return await _whole(self.stream(prompt, **settings))

    async def chat(self, messages: Messages, **settings: Unpack[Settings]) -> Answer:
        """The whole answer to a conversation (the first one, if `n` asks for several)."""
        return (await _whole(self.stream_chat(messages, **settings)))[0]

    async def models(self, timeout_s: float | None = None) -> list[Model]:
        """What is served: one model."""
        asked = Asked(pb.GetModelRequest(), timeout_s)
        return [convert.model_of(await self._call("GetModel", asked))]

    async def stats(self, timeout_s: float | None = None) -> Stats:
        """What the engine is doing and has done."""
        return convert.stats_of(await self._call("Stats", Asked(pb.StatsRequest(), timeout_s)))

    async def tokenize(self, prompt: str | Messages, timeout_s: float | None = None) -> list[int]:
        """Token ids of a text or a conversation, as the server reads them."""
        asked = Asked(convert.tokenize_request(prompt), timeout_s)
        return list((await self._call("Tokenize", asked)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float | None = None) -> str:
        """The text of token ids, special tokens left out."""
        ids = convert.token_ids(token_ids).ids
        asked = Asked(pb.DetokenizeRequest(token_ids=ids), timeout_s)
        return str((await self._call("Detokenize", asked)).text)

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return when the server welcomes requests. Raises TimedOutError saying why it does not."""
        deadline_s, why = time.monotonic() + timeout_s, "no answer"
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                reply = await self._method("Stats")(
                    pb.StatsRequest(), timeout=left_s, metadata=self._access.metadata
                )
            except grpc.RpcError as error:
                why = why_not_ready(error, self.address)
            else:
                if not reply.not_ready:
                    return
                why = reply.not_ready
            await asyncio.sleep(min(READY_POLL_S, left_s))
        raise unreachable(self.address, timeout_s, why)

    async def close(self) -> None:
        """Cancel all calls and close the connection. Harmless a second time."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _method(self, name: str) -> Any:
        if self._closed:
            raise EngineError("this client is closed; make a new one")
        if self._channel is None:
            self._channel = self._access.open_channel(grpc.aio, self.address, CHANNEL_OPTIONS)
            self._stub = pb_grpc.InferenceServiceStub(self._channel)
        return getattr(self._stub, name)

    async def _call(self, name: str, asked: Asked) -> Any:
        attempts = Attempts(self._retry, asked.timeout_s)
        metadata = (*asked.metadata, *self._access.metadata)
        while True:
            method = self._method(name)
            try:
                return await method(asked.message, timeout=attempts.left_s, metadata=metadata)
            except grpc.RpcError as error:
                if (wait_s := attempts.wait_s(error)) is None:
                    raise error_of(error, self.address) from error
            await asyncio.sleep(wait_s)

    async def _stream(self, name: str, asked: Asked) -> AsyncGenerator[Event]:
        attempts = Attempts(self._retry, asked.timeout_s)
        metadata = (*asked.metadata, *self._access.metadata)
        while True:
            method, begun = self._method(name), False
            call = method(asked.message, timeout=attempts.left_s, metadata=metadata)
            try:
                async for message in call:
                    begun = True
                    yield convert.event_of(message)
                return
            except grpc.RpcError as error:
                wait_s = None if begun else attempts.wait_s(error)
                if wait_s is None:
                    raise error_of(error, self.address) from error
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)


async def _whole(events: AsyncIterator[Event]) -> list[Answer]:
    answers = Answers()
    async for event in events:
        answers.add(event)
    return answers.whole()
