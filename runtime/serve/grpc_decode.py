"""Bytes that are no message are the caller's error; by itself gRPC reports them as the server's."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from ortolan.errors import RequestError
from ortolan.runtime.serve.grpc_errors import status_of

_UNREADABLE = object()


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Answers INVALID_ARGUMENT where a request's bytes cannot be read, for every service."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        streams = handler.request_streaming, handler.response_streaming
        asks, answers = ("stream" if streamed else "unary" for streamed in streams)
        method = getattr(handler, f"{asks}_{answers}")
        make = getattr(grpc, f"{asks}_{answers}_rpc_method_handler")
        return make(
            _checked(method, _readable if handler.request_streaming else _check),
            request_deserializer=_deserializer(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _deserializer(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def reading(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _UNREADABLE

    return reading


def _checked(method: Any, check: Callable[[Any, Any], Any]) -> Any:
    """The method behind a check of what it is given; the same kind of function, which gRPC asks."""
    if inspect.isasyncgenfunction(method):

        async def generating(asked: Any, context: Any) -> AsyncIterator[Any]:
            async for message in method(await check(asked, context), context):
                yield message

        return generating

    async def answering(asked: Any, context: Any) -> Any:
        return await method(await check(asked, context), context)

    return answering


async def _check(request: Any, context: Any) -> Any:
    if request is _UNREADABLE:
        error = RequestError("the request's bytes are no message of this method; see its .proto")
        await context.abort_with_status(rpc_status.to_status(status_of(error, unavailable=False)))
    return request


async def _readable(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    async def reading() -> AsyncIterator[Any]:
        async for request in requests:
            yield await _check(request, context)

    return reading()
