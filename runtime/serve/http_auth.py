"""The door of HTTP: no key, no service."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ortolan.errors import AuthenticationError, RateLimitError
from ortolan.runtime.serve.callers import CALLER
from ortolan.runtime.serve.http_endpoint import REQUEST_ID, send_error
from ortolan.runtime.serve.http_errors import as_api_error
from ortolan.runtime.serve.security import Security


def with_keys(app: ASGIApp, security: Security) -> ASGIApp:
    """The application for key holders only, whatever its routes: what it lacks, too.

    The answer to others goes out before anything of the body is read.
    """
    keys = security.keys
    if keys is None:
        return app

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are none; should one come, it gets nothing
        if not security.needs_key(scope["path"]):
            await app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        try:
            caller = keys.admit(given)
        except (AuthenticationError, RateLimitError) as exc:
            request_id = scope[REQUEST_ID]
            error = as_api_error(exc, request_id=request_id, not_ready=None, spellings={})
            await send_error(send, error)
            return
        token = CALLER.set(caller)
        try:
            await app(scope, receive, send)
        finally:
            CALLER.reset(token)

    return wrapped
