"""Completions over HTTP/1.1, streamed, on connections that are kept.

Made by hand: a client that shares the machine with the server must not take its time. While an
answer arrives, its bytes are taken out of their chunks and stamped, nothing more.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ortolan.bench.serving.http1 import MalformedError, Response
from ortolan.bench.serving.load import LoadRequest
from ortolan.bench.serving.outcome import DROPPED, MALFORMED, NOT_CONNECTED, Lost, Outcome, Reply
from ortolan.bench.serving.sse import Piece, message_of, read_completion

if TYPE_CHECKING:
    from ortolan.client.access import AccessSettings


@dataclass
class HttpReply:
    """A response with the times at which the pieces of its body arrived."""

    response: Response = field(default_factory=Response)
    pieces: list[Piece] = field(default_factory=list)
    problem: tuple[str, str] | None = None  # how it was lost, and what was said
    end_s: float = 0.0
    resent: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def outcome(self) -> Outcome:
        return replace(self._outcome(), resent=self.resent)

    def _outcome(self) -> Outcome:
        if self.problem is not None:
            kind, detail = self.problem
            return Outcome(self.end_s, lost=kind, detail=detail)
        if self.response.status != 200:
            kind = f"status {self.response.status}"
            return Outcome(self.end_s, lost=kind, detail=_said(self.body))
        content = self.response.headers.get("content-type", "")
        if not content.startswith("text/event-stream"):
            return Outcome(self.end_s, lost=MALFORMED, detail=f"Content-Type is {content!r}")
        return read_completion(self.pieces, self.end_s)


class HttpWire:
    """Connections to an OpenAI-compatible server at http://host:port and a path before /v1.

    Raises UsageError if a file of `access` cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        path: str,
        ignore_eos: bool = False,
        access: AccessSettings | None = None,
    ) -> None:
        self.model: str | None = None  # what the server calls its model; see `greet`
        self._host, self._port, self._path = host, port, path
        name = f"[{host}]" if ":" in host else host
        self._headers = f"Host: {name}:{port}\r\nUser-Agent: ortolan-bench\r\n"
        self._tls: ssl.SSLContext | None = None
        if access:
            from ortolan.client.access import Access

            given = Access(**access)
            given.warn_of_plaintext(f"{name}:{port}")
            self._headers += "".join(f"{key}: {value}\r\n" for key, value in given.metadata)
            self._tls = given.context() if given.encrypted else None
        self._more: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def greet(self) -> HttpReply:
        """Ask for the models, and take the first one's name for all requests."""
        head = f"GET {self._path}/v1/models HTTP/1.1\r\n{self._headers}\r\n"
        reply = await self._exchange(head.encode())
        if isinstance(reply, Lost):
            reply = HttpReply(problem=(reply.kind, reply.detail))
        try:
            self.model = str(json.loads(reply.body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            self.model = None
        return reply

    async def send(self, request: LoadRequest) -> Reply:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }
        data = json.dumps({name: value for name, value in body.items() if value is not None})
        head = (
            f"POST {self._path}/v1/completions HTTP/1.1\r\n{self._headers}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return await self._exchange(head.encode() + data.encode())

    async def close(self) -> None:
        for connection in tuple(self._open):
            connection.abort()
        await asyncio.sleep(0)  # so that the transports are told

    async def _exchange(self, data: bytes) -> HttpReply | Lost:
        resent = False
        while True:
            connection = self._idle.pop() if self._idle else None
            is_new = connection is None
            if connection is None:
                try:
                    connection = await self._connect()
                except OSError as error:
                    said = error.strerror or str(error) or type(error).__name__
                    return Lost(NOT_CONNECTED, said, time.perf_counter())
            reply = await connection.exchange(data)
            # A server may close a kept connection at any time, also while a request is on its
            # way. Like other HTTP clients this one then sends the request again.
            closed = reply.problem is not None and reply.problem[0] == DROPPED
            if is_new or not closed or reply.response.status:
                reply.resent = resent
                return reply
            resent = True

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._idle, self._open), self._host, self._port, ssl=self._tls
        )
        return connection


class _Connection(asyncio.Protocol):
    """One connection; it puts itself into `idle` while it can take a request."""

    def __init__(self, idle: list[_Connection], opened: set[_Connection]) -> None:
        self._idle, self._opened = idle, opened
        self._transport: asyncio.Transport | None = None
        self._reply = HttpReply()
        self._waiting: asyncio.Future[None] | None = None

    async def exchange(self, data: bytes) -> HttpReply:
        assert self._transport is not None
        assert self._waiting is None
        reply = self._reply = HttpReply()
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            await self._waiting
        except asyncio.CancelledError:
            self.abort()
            raise
        return reply

    def abort(self) -> None:
        self._waiting = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        arrived_s = time.perf_counter()
        if self._waiting is None:  # more than was asked for
            self.abort()
            return
        reply = self._reply
        try:
            piece = reply.response.feed(data)
        except MalformedError as error:
            reply.problem = MALFORMED, str(error)
            self._end(arrived_s, keep=False)
            return
        if piece:
            reply.pieces.append((arrived_s, piece))
        if reply.response.done:
            self._end(arrived_s, keep=reply.response.keeps_open)

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._waiting is None:
            return
        self._reply.response.feed_end()
        if not self._reply.response.done:
            said = str(exc) if exc else "closed by the server"
            self._reply.problem = DROPPED, f"{said}, {len(self._reply.body)} bytes of the answer"
        self._end(time.perf_counter(), keep=False)

    def _end(self, end_s: float, *, keep: bool) -> None:
        self._reply.end_s = end_s
        waiting, self._waiting = self._waiting, None
        assert self._transport is not None
        if keep:
            self._idle.append(self)
        else:
            self._transport.abort()
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def _said(body: bytes) -> str:
    try:
        return message_of(json.loads(body))
    except ValueError:
        return message_of(body.decode("utf-8", "replace").strip())
