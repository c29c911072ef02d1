"""One HTTP connection: uvicorn's protocol, with bounds on what a client may keep open."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 << 10
_REQUEST_TIMEOUT_S = 30.0
_STALL_TIMEOUT_S = 60.0


class GuardedProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers are too long or whose request does not
    come to its end, one that takes nothing of what was written, and one too many.

    A request that comes before the last one is answered is not read: that answer is the
    connection's last, and the client asks again. Queued, it would hide the client's leaving.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrived_bytes = 0  # in pieces while the head was not complete
        self._head_bytes = 0  # of the request line and headers that were parsed
        self._in_head = True
        self._deaf = False
        self._incoming: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            # At once, and not when it asks: those that never ask take descriptors too.
            self._refuse(b"503 Service Unavailable", b"retry-after: 1\r\n")
            return
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        if self._in_head:
            self._arrived_bytes += len(data)
            self._expect_request()
        super().data_received(data)
        if self._in_head and self._arrived_bytes > _HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._arrived_bytes = False, 0
        if self._head_bytes > _HEAD_BYTES:  # it came in one piece, so only now is its size known
            self._deaf = True
            self._refuse_head()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        self._in_head = True
        if self._incoming is not None:
            self._incoming.cancel()
            self._incoming = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(_STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def end(self) -> None:
        """Close the connection; what a client does not read is dropped."""
        if self.flow.write_paused:
            self.transport.abort()
        else:
            self.transport.close()

    def _expect_request(self) -> None:
        if self._incoming is None:
            self._incoming = self.loop.call_later(_REQUEST_TIMEOUT_S, self._late)

    def _late(self) -> None:
        self._incoming = None
        self._refuse(b"408 Request Timeout")

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large")

    def _refuse(self, status: bytes, headers: bytes = b"") -> None:
        """Say why and end, unless an answer is on its way already."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(
                b"HTTP/1.1 %s\r\n%scontent-length: 0\r\nconnection: close\r\n\r\n"
                % (status, headers)
            )
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._incoming, self._stalled):
            if timer is not None:
                timer.cancel()
