"""Messages that cannot be read are the caller's error; gRPC would call them UNKNOWN."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from ortolan.errors import RequestError
from ortolan.runtime.serve.grpc_errors import status_of

Handler = Any  # grpc.RpcMethodHandler; the package has no types
Details = Any  # grpc.HandlerCallDetails


def _unreadable() -> RequestError:
    return RequestError(
        "the message cannot be read; it is not the one that this method takes, or a text in it is "
        "not UTF-8"
    )


class MalformedInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # has no types
    """Answers INVALID_ARGUMENT to what is no message of the method, whichever service has it.

    gRPC reads a single message before the method is called, so reading must not fail: the method
    is then not called. A stream is read by the method, which gets a RequestError from it.
    """

    def __init__(self) -> None:
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """The method's handler with its reading guarded; None for an unknown method."""
        handler = await continuation(details)
        if handler is None:
            return None
        guarded = self._guarded.get(details.method)
        if guarded is None:
            guarded = self._guarded[details.method] = _guarded(handler)
        return guarded


def _guarded(handler: Handler) -> Handler:
    read = handler.request_deserializer

    def read_or_error(message: bytes) -> Any:
        try:
            return read(message)
        except DecodeError:
            return _unreadable()

    def read_or_raise(message: bytes) -> Any:
        try:
            return read(message)
        except DecodeError:
            raise _unreadable() from None

    if handler.request_streaming:
        answers = handler.stream_stream
        # Reflection, which gives its answers so, knows nothing of our errors.
        if inspect.isasyncgenfunction(answers):
            handler = handler._replace(stream_stream=_explained(answers))
        return handler._replace(request_deserializer=read_or_raise)
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    method = getattr(handler, kind)

    async def checked(request: Any, context: Any) -> Any:
        if isinstance(request, RequestError):
            status = status_of(request, unavailable=False)
            await context.abort_with_status(rpc_status.to_status(status))
        return await method(request, context)

    return handler._replace(request_deserializer=read_or_error, **{kind: checked})


def _explained(answers: Callable[[Any, Any], AsyncIterator[Any]]) -> Any:
    """A generator of answers, with the error of a message as a status."""

    async def explained(requests: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for answer in answers(requests, context):
                yield answer
        except RequestError as error:
            status = status_of(error, unavailable=False)
            await context.abort_with_status(rpc_status.to_status(status))

    return explained
