"""Every gRPC method as a `Call`: an interceptor, so that a new service cannot be forgotten."""

from __future__ import annotations

import asyncio
import inspect
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from ortolan.runtime.serve.calls import Call
from ortolan.runtime.serve.service import Service

REQUEST_ID = "x-request-id"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_KINDS = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Opens a call before the method, and before interceptors that come after this one.

    Its request id is the client's, if that is short and plain, or made up.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        metadata = {
            key: value
            for key, value in handler_call_details.invocation_metadata or ()
            if isinstance(value, str)
        }
        given = metadata.get(REQUEST_ID, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        call = self._service.open_call("grpc", request_id, metadata)
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method, whose name is anything that a client likes
            return None
        make, kind = _KINDS[handler.request_streaming, handler.response_streaming]
        # A call that was refused unseen may name any method, and names are labels of metrics.
        if not getattr(getattr(handler, kind), "before_routing", False):
            call.route = handler_call_details.method
        return make(
            _followed(getattr(handler, kind), call),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _followed(method: Callable[..., Any], call: Call) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(method):

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with _over(call, context):
                async for reply in method(request, context):
                    yield reply

        return stream

    async def answer(request: Any, context: Any) -> Any:
        with _over(call, context):
            return await method(request, context)

    return answer


@contextmanager
def _over(call: Call, context: Any) -> Iterator[None]:
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        left = context.time_remaining()
        call.over("DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED")
        raise
    except BaseException:
        call.over(_name(context.code()) or "UNKNOWN")
        raise
    else:
        call.over(_name(context.code()) or "OK")


def _name(code: Any) -> str | None:
    """The status that a method has set: grpc's enumeration, or its number; 0 if none."""
    return (
        _NAMES.get(code.value[0] if isinstance(code, grpc.StatusCode) else code) if code else None
    )
