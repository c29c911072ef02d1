"""Keys at the doors of both servers: nothing is open without one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("starlette")

from google.rpc import error_details_pb2, status_pb2
from grpc_serving import PROMPT, MockService, in_loop, serving
from http_live import live
from keyed import ALICE, BOB, bearer, secured
from scripted_service import ScriptedService
from starlette.applications import Starlette

from ortolan.client.aio import AsyncClient
from ortolan.client.sync import Client
from ortolan.errors import AuthenticationError, UsageError
from ortolan.runtime.serve import grpc_server, http_app
from ortolan.runtime.serve.config import ServeConfig
from ortolan.runtime.serve.security import (
    OPEN_PATHS,
    Security,
    is_loopback,
    open_security,
)

# Every route and every method, read from the servers themselves.


def http_routes(monkeypatch: pytest.MonkeyPatch, security: Security) -> list[tuple[str, str]]:
    """Method and path of every route of the application."""
    made: list[Starlette] = []

    class Seen(Starlette):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            made.append(self)

    monkeypatch.setattr(http_app, "Starlette", Seen)
    http_app.create_app(ScriptedService(lambda request: ()), security=security)  # type: ignore[arg-type]
    (app,) = made
    return [
        (method, route.path.replace("{id:path}", "scripted"))  # type: ignore[attr-defined]
        for route in app.routes
        for method in sorted(route.methods)  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("key", [None, "Bearer", f"Bearer {ALICE}x", f"Basic {ALICE}", ALICE])
def test_every_route_is_closed_without_a_key(
    monkeypatch: pytest.MonkeyPatch, keys_file: Path, key: str | None
) -> None:
    """A route that somebody adds and forgets to protect is protected all the same."""
    security = secured(keys_file)
    routes = http_routes(monkeypatch, security)
    assert len(routes) > 10
    headers = {} if key is None else {"Authorization": key}
    with live(ScriptedService(lambda request: ()), security=security) as server:
        for method, path in [*routes, ("GET", "/absent"), ("OPTIONS", "/v1/models")]:
            answer = server.call(method, path, headers=headers)
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
            if method != "HEAD":
                assert answer.error["code"] == "invalid_api_key"
                assert ALICE not in answer.error["message"]


def test_two_keys_in_one_request_are_none(keys_file: Path) -> None:
    """A proxy may have checked the one, and we the other."""
    head = "GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    twice = "".join(f"Authorization: Bearer {key}\r\n" for key in (ALICE, BOB))
    with (
        live(ScriptedService(lambda request: ()), security=secured(keys_file)) as server,
        server.raw(f"{head}{twice}\r\n".encode()) as connection,
    ):
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_refusal_does_not_wait_for_the_body(keys_file: Path) -> None:
    """Strangers must not make the server read, nor hold what they send."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Content-Length: 3000000\r\nExpect: 100-continue\r\n\r\n"
    )
    with (
        live(ScriptedService(lambda request: ()), security=secured(keys_file)) as server,
        server.raw(head.encode()) as connection,
    ):
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_key_opens_http(keys_file: Path) -> None:
    with live(ScriptedService(lambda request: ()), security=secured(keys_file)) as server:
        assert server.call("GET", "/v1/models", headers=bearer(BOB)).status == 200
        assert server.call("GET", "/v1/models", headers={"authorization": f"bearer {BOB}"})
        assert server.call("GET", "/absent", headers=bearer(BOB)).status == 404


@pytest.mark.parametrize("words", ["health", "metrics", "page, health"])
def test_open_paths_are_those_that_were_named_and_no_others(
    monkeypatch: pytest.MonkeyPatch, keys_file: Path, words: str
) -> None:
    """An orchestrator's probes have no key; everything else stays closed."""
    security = secured(keys_file, words)
    named = {path for word in words.split(", ") for path in OPEN_PATHS[word]}
    routes = http_routes(monkeypatch, security)
    with live(ScriptedService(lambda request: ()), security=security) as server:
        for method, path in routes:
            assert (server.call(method, path).status == 401) == (path not in named), path
        for odd in (
            "/health/live/",
            "//health/live",
            "/health/live/../../v1/models",
            "/HEALTH/live",
        ):
            assert server.call("GET", odd).status == 401, odd


def test_unknown_word_for_open_paths_is_refused(keys_file: Path) -> None:
    with pytest.raises(UsageError, match="has the word 'helth'; known are health, metrics, page"):
        secured(keys_file, "metrics,helth")
    with pytest.raises(UsageError, match="open_paths means nothing without api_keys_file"):
        open_security(ServeConfig(open_paths="health"))


@pytest.fixture
def grpc_methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Filled when a server is made: full name -> handler of every method that was added to it."""
    found: dict[str, Any] = {}
    make = grpc.aio.server

    class Seen:
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._server = make(*args, **settings)

        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            for handler in handlers:
                found.update(handler._method_handlers)
            self._server.add_generic_rpc_handlers(handlers)

        def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
            found.update({f"/{service}/{name}": one for name, one in handlers.items()})
            self._server.add_registered_method_handlers(service, handlers)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._server, name)

    monkeypatch.setattr(grpc_server.grpc.aio, "server", Seen)
    return found


async def call(channel: Any, method: str, handler: Any, metadata: Any = ()) -> Any:
    """The status code of a call with an empty message, None if it is answered."""
    if handler is not None and handler.request_streaming:
        made = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=20)
    elif handler is not None and handler.response_streaming:
        made = channel.unary_stream(method)(b"", metadata=metadata, timeout=20)
    else:
        made = channel.unary_unary(method)(b"", metadata=metadata, timeout=20)
    try:
        if handler is None or not handler.response_streaming:
            await made
        else:
            async with aclosing(aiter(made)) as replies:
                await anext(replies, None)
            made.cancel()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


@pytest.mark.parametrize("open_paths", [None, "health"])
@in_loop
async def test_every_grpc_method_is_closed_without_a_key(
    grpc_methods: dict[str, Any], keys_file: Path, open_paths: str | None
) -> None:
    """Reflection, health, and services that somebody adds later."""
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    security = secured(keys_file, open_paths)
    async with serving(MockService(), security) as address:
        assert len(grpc_methods) > 8
        assert "/grpc.health.v1.Health/Check" in grpc_methods
        async with grpc.aio.insecure_channel(address) as channel:
            for method, handler in {**grpc_methods, "/absent.Service/Method": None}.items():
                if open_paths is not None and method in OPEN_PATHS["health"]:
                    assert await call(channel, method, handler) is not unauthenticated, method
                    continue
                for given in ((), bearer(ALICE + "x"), {"authorization": ALICE}):
                    metadata = [(name.lower(), value) for name, value in dict(given).items()]
                    assert await call(channel, method, handler, metadata) is unauthenticated, method
                admitted = [("authorization", f"Bearer {ALICE}")]
                assert await call(channel, method, handler, admitted) is not unauthenticated, method


@in_loop
async def test_strangers_names_of_methods_are_no_labels(keys_file: Path) -> None:
    """Whoever needs no key to be refused could otherwise mint series until the server is full."""
    service = MockService()
    async with (
        serving(service, secured(keys_file)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert await call(channel, "/evil.Service/Method", None) is grpc.StatusCode.UNAUTHENTICATED
        shown, _ = service.metrics.exposition("")
    assert b'route="other",status="UNAUTHENTICATED"' in shown
    assert b"evil" not in shown


@in_loop
async def test_grpc_refuses_before_a_message_is_read(keys_file: Path) -> None:
    """Strangers get their answer while their message is still to come; they fill no memory."""

    async def never() -> Any:
        await asyncio.sleep(3600)
        yield b""

    async with (
        serving(MockService(), secured(keys_file)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        made = channel.stream_unary("/ortolan.v1.InferenceService/Tokenize")(never())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(made, 20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        status = status_pb2.Status.FromString(
            dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
        )
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert (info.reason, info.domain) == ("INVALID_API_KEY", "ortolan")


@in_loop
async def test_clients_send_their_key_and_are_told_of_a_wrong_one(keys_file: Path) -> None:
    """No waiting and no trying again makes a wrong key right."""
    async with serving(MockService(), secured(keys_file)) as address:
        async with AsyncClient(address, api_key=ALICE) as client:
            await client.wait_ready()
            assert await client.generate(PROMPT, max_tokens=2)
            assert (await client.models())[0].name == "mock"
        async with AsyncClient(address) as client:
            with pytest.raises(AuthenticationError, match="wants a key; send the header"):
                await client.wait_ready()
        with Client(address, api_key="wrong") as other:
            with pytest.raises(AuthenticationError, match="not known here"):
                await asyncio.to_thread(other.wait_ready)
            with pytest.raises(AuthenticationError, match="not known here"):
                await asyncio.to_thread(other.generate, PROMPT)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_told_from_the_network(host: str, expected: bool) -> None:
    """Keys in clear text on a network are worth a line at the start."""
    assert is_loopback(host) is expected
