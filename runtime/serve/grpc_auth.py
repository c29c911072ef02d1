"""The door of gRPC: no key, no service; and its port's encryption."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_status import rpc_status

from ortolan.errors import AuthenticationError, OrtolanError, RateLimitError
from ortolan.runtime.serve.callers import CALLER, Keys
from ortolan.runtime.serve.grpc_errors import status_of
from ortolan.runtime.serve.security import Security
from ortolan.runtime.serve.tls import Tls


def server_credentials(tls: Tls) -> Any:
    """What a secure port is added with. Every new connection gets the certificate as it is then."""

    def now() -> Any:
        pairs = [(tls.key, tls.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, tls.client_ca)

    return grpc.dynamic_ssl_server_credentials(now(), now, tls.client_ca is not None)


def key_interceptors(security: Security) -> tuple[Any, ...]:
    """What lets key holders pass only; nothing if no key is needed."""
    return () if security.keys is None else (_KeyInterceptor(security, security.keys),)


class _KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # the package has no types
    """Asks for a key before any method, of whatever service, and for methods that do not exist."""

    def __init__(self, security: Security, keys: Keys) -> None:
        self._security = security
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        if self._security.needs_key(handler_call_details.method):
            metadata = handler_call_details.invocation_metadata
            given = [value.encode() for name, value in metadata if name == "authorization"]
            try:
                CALLER.set(self._keys.admit(given))  # the call's task is its own
            except (AuthenticationError, RateLimitError) as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: OrtolanError) -> Any:
    async def refuse(messages: Any, context: Any) -> None:
        status = status_of(error, unavailable=False)
        await context.abort_with_status(rpc_status.to_status(status))

    refuse.before_routing = True  # type: ignore[attr-defined]  # see CallInterceptor
    # Of all kinds of handlers this is the one that is called before a message is read; on the
    # wire all kinds look the same.
    return grpc.stream_stream_rpc_method_handler(refuse)
