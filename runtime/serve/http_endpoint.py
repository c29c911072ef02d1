"""What all endpoints share: one request's way in and out, its errors, and its client's leaving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from ortolan.errors import CancelledError, TemplateError
from ortolan.runtime.serve.http_body import (
    LARGE_BYTES,
    ClientGoneError,
    HttpLimits,
    parse_object,
    read_body,
)
from ortolan.runtime.serve.http_errors import ApiError, as_api_error
from ortolan.runtime.serve.http_fields import COMMON
from ortolan.runtime.serve.service import Service

T = TypeVar("T")

REQUEST_ID = "ortolan.request_id"  # its key in the scope


class Exchange:
    """One request and its answer.

    spellings: our names of fields -> the request's, for errors. streaming: whether events have
    begun, after which an error is an event too.
    """

    def __init__(
        self, service: Service, limits: HttpLimits, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.service = service
        self.limits = limits
        self.scope = scope
        self.receive = receive
        self.send = send
        self.spellings: Mapping[str, str] = {name: name for name in (*COMMON, "prompt")}
        self.streaming = False
        self._large = False

    async def body(self) -> dict[str, Any]:
        """The JSON object in the body. Raises ApiError, ClientGoneError."""
        body = await read_body(Headers(scope=self.scope), self.receive, self.limits)
        self._large = len(body) >= LARGE_BYTES
        return await self.aside(parse_object, body, self.limits)

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """What `work` returns; on a thread if the body is large, so that no stream stalls."""
        return await asyncio.to_thread(work, *args) if self._large else work(*args)

    def error(self, exc: Exception) -> ApiError:
        """What the client is told of `exc`."""
        if isinstance(
            exc, TemplateError
        ):  # it may say where the bundle lies, which is our business
            shown = str(exc).replace(str(self.service.bundle.path), self.service.name)
            exc = TemplateError(shown)
        return as_api_error(
            exc,
            request_id=self.scope[REQUEST_ID],
            not_ready=self.service.not_ready,
            spellings=self.spellings,
        )

    async def fail(self, exc: Exception) -> None:
        """Tell the client, by status or, once events have begun, by an event."""
        error = self.error(exc)
        if self.streaming:
            event = b"data: " + error.body + b"\n\n"
            await self.send({"type": "http.response.body", "body": event})
        else:
            await send_error(self.send, error)


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """An ASGI application around a handler.

    From the body's end on the client's leaving is watched for, and cancels the handler wherever
    it is.
    """

    def __init__(self, handler: Handler, service: Service, limits: HttpLimits) -> None:
        self._handler = handler
        self._service = service
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watched = _Watched(receive)
        exchange = Exchange(self._service, self._limits, scope, watched.receive, send)
        work = asyncio.create_task(self._work(exchange))
        gone = asyncio.create_task(watched.gone())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server's time to shut down is over
            await _ended(work)
            await exchange.fail(CancelledError("the server is shutting down"))
        finally:
            await _ended(work, gone)

    async def _work(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except ClientGoneError:
            pass
        except Exception as exc:  # noqa: BLE001  whatever it is, the client is owed an answer
            await exchange.fail(exc)


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class _Watched:
    """Tells a handler's reading of the body and the watch for the client's leaving apart."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read = asyncio.Event()

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._read.set()
        return message

    async def gone(self) -> None:
        """Returns when the client has left, which shows only once the body has been read."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def send_json(
    send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    """A whole JSON answer."""
    await send_whole(send, status, body, "application/json", headers)


async def send_object(send: Send, status: int, value: Mapping[str, Any]) -> None:
    """A whole JSON answer from a mapping."""
    await send_json(send, status, json.dumps(value).encode())


async def send_error(send: Send, error: ApiError) -> None:
    """An error in OpenAI's shape."""
    await send_json(send, error.status, error.body, error.headers)


async def send_whole(
    send: Send, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None
) -> None:
    """A whole answer of a media type."""
    fields = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
