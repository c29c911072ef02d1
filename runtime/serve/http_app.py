"""The HTTP interface as an ASGI application: routes, request ids, errors of routing."""

from __future__ import annotations

import re
import secrets
from functools import partial

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ortolan.runtime.serve import http_plain as plain
from ortolan.runtime.serve.calls import OTHER, Call
from ortolan.runtime.serve.http_auth import with_keys
from ortolan.runtime.serve.http_body import HttpLimits
from ortolan.runtime.serve.http_endpoint import REQUEST_ID, Endpoint, Handler
from ortolan.runtime.serve.http_errors import ApiError
from ortolan.runtime.serve.http_generate import generating
from ortolan.runtime.serve.http_openapi import docs, openapi
from ortolan.runtime.serve.http_page import chat_page
from ortolan.runtime.serve.http_requests import chat_call, completion_call
from ortolan.runtime.serve.security import Security
from ortolan.runtime.serve.service import Service

# What nginx logs where a client left before it had an answer.
_CLIENT_GONE = "499"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(
    service: Service,
    limits: HttpLimits | None = None,
    security: Security | None = None,
    *,
    with_page: bool = True,
) -> ASGIApp:
    """An application that serves one model. It neither warms the service up nor closes it.

    with_page: whether / is the chat page.
    """
    endpoint = partial(Endpoint, service=service, limits=limits or HttpLimits())

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, endpoint(handler), methods=[method])

    routes = [
        route("/v1/models", plain.models),
        route("/v1/models/{id:path}", plain.model),
        route("/v1/completions", generating(completion_call), "POST"),
        route("/v1/chat/completions", generating(chat_call), "POST"),
        route("/tokenize", plain.tokenize, "POST"),
        route("/detokenize", plain.detokenize, "POST"),
        route("/health/live", plain.live),
        route("/health/ready", plain.ready),
        route("/metrics", plain.metrics),
        route("/openapi.json", openapi),
        route("/docs", docs),
    ]
    if with_page:
        routes.append(route("/", chat_page))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _routing_error})
    app.router.redirect_slashes = False
    return _as_calls(with_keys(app, security or Security()), service)


async def _routing_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        allowed = (exc.headers or {}).get("Allow", "")
        error = ApiError(405, f"use {allowed} on this path", "method_not_allowed")
    else:
        error = ApiError(404, "no such path; /docs lists what there is", "not_found")
        error.status = exc.status_code
    return Response(error.body, error.status, exc.headers, "application/json")


def _as_calls(app: ASGIApp, service: Service) -> ASGIApp:
    """Makes each request a `Call`, and sends its id back: X-Request-Id, if it is short and plain.

    It is for the logs of both sides. Nothing is looked up by it, so that equal ones do not meet.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope[REQUEST_ID] = request_id
        call = service.open_call("http", request_id, headers)
        call.status = _CLIENT_GONE
        try:
            await app(scope, receive, _adding(send, (b"x-request-id", request_id.encode()), call))
        finally:
            # The path as it was declared: what a client asked for may be anything.
            call.route = getattr(scope.get("route"), "path", OTHER)
            call.over(call.status)

    return wrapped


def _adding(send: Send, header: tuple[bytes, bytes], call: Call) -> Send:
    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            call.status = str(message["status"])
            message = {**message, "headers": [*message["headers"], header]}
        await send(message)

    return adding
