"""Keys, tenants and limits, at the doors of both servers and behind them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("starlette")

from google.rpc import error_details_pb2, status_pb2
from grpc_serving import NO_RETRY, PROMPT, MockService, in_loop, serving
from http_live import live
from mock_engine import Clock
from scripted_service import ScriptedService
from starlette.applications import Starlette

from ortolan.client.aio import AsyncClient
from ortolan.client.calls import RetryPolicy
from ortolan.client.sync import Client
from ortolan.errors import AuthenticationError, OverloadedError, RateLimitError, UsageError
from ortolan.runtime.params import Request, SamplingParams, TokenEvent, Usage
from ortolan.runtime.serve import grpc_server, http_app
from ortolan.runtime.serve.callers import CALLER, Keys
from ortolan.runtime.serve.config import ServeConfig
from ortolan.runtime.serve.security import (
    OPEN_PATHS,
    Security,
    is_loopback,
    open_security,
    reload_on_hangup,
)

ALICE, ADA, BOB = "alice-key-of-tenant-acme", "ada-key-of-tenant-acme-", "bob-key-of-his-own-tenant"
KEYS = f"""
[alice]
key = "{ALICE}"
tenant = "acme"

[ada]
key = "{ADA}"
tenant = "acme"

[bob]
key = "{BOB}"
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return file


def secured(file: Path, open_paths: str | None = None) -> Security:
    return open_security(ServeConfig(api_keys_file=str(file), open_paths=open_paths))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


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


# Tenants.


@in_loop
async def test_tenants_share_no_cached_prompts_whatever_their_salts(keys_file: Path) -> None:
    """vllm#16016: who sees that a prompt was cached knows that somebody else has sent it."""
    service = MockService(prefix_blocks=32)
    prompt = list(range(5, 45))

    async def cached(key: str, salt: str = "") -> int:
        async with AsyncClient(address, api_key=key, retry=NO_RETRY) as client:
            settings = {"max_tokens": 1, "temperature": 0.0, "cache_salt": salt or None}
            (answer,) = await client.generate(prompt, **settings)  # type: ignore[arg-type]
            return answer.usage.cached_tokens

    async with serving(service, secured(keys_file)) as address:
        assert await cached(ALICE) == 0
        assert await cached(ALICE) > 0
        assert await cached(ADA) > 0, "of the same tenant"
        assert await cached(BOB) == 0
        # Neither another tenant's salt, nor anything that looks like one of ours, gets in.
        assert await cached(ALICE, "secret") == 0
        assert await cached(ADA, "secret") > 0
        for guess in ("secret", "acme", "acme\0", "acme\0secret"):
            assert await cached(BOB, guess) == 0, guess
        assert await cached(BOB) > 0, "his own"


# Limits.


def limited(tmp_path: Path, limits: str) -> tuple[Security, Clock, Path]:
    file, clock = tmp_path / "limited.toml", Clock()
    file.write_text(f'[alice]\nkey = "{ALICE}"\n{limits}\n[bob]\nkey = "{BOB}"\n')
    return Security(keys=Keys(file, clock)), clock, file


def test_http_requests_past_the_limit_are_told_when_to_come_back(tmp_path: Path) -> None:
    """OpenAI's client waits for Retry-After by itself; other keys notice nothing."""
    security, clock, _ = limited(tmp_path, "requests_per_minute = 3")
    with live(ScriptedService(lambda request: ()), security=security) as server:
        for _ in range(3):
            assert server.call("GET", "/v1/models", headers=bearer(ALICE)).status == 200
        refused = server.call("GET", "/v1/models", headers=bearer(ALICE))
        assert refused.status == 429
        assert refused.headers["retry-after"] == "20"
        assert refused.error["type"] == "rate_limit_error"
        assert refused.error["code"] == "rate_limit_exceeded"
        assert "its 3 requests per minute" in refused.error["message"]
        assert server.call("GET", "/v1/models", headers=bearer(BOB)).status == 200
        clock.now += 20
        assert server.call("GET", "/v1/models", headers=bearer(ALICE)).status == 200
        assert server.call("GET", "/v1/models", headers=bearer(ALICE)).status == 429


def test_openai_client_knows_both_refusals(tmp_path: Path) -> None:
    """Programs catch its classes, which it chooses by our status and shape."""
    openai = pytest.importorskip("openai")
    security, _, _ = limited(tmp_path, "requests_per_minute = 1")
    with live(ScriptedService(lambda request: ()), security=security) as server:
        settings = {"base_url": f"{server.url}/v1", "max_retries": 0}
        with openai.OpenAI(api_key="none", **settings) as stranger:
            with pytest.raises(openai.AuthenticationError, match="not known here") as caught:
                stranger.models.list()
            assert caught.value.code == "invalid_api_key"
        with openai.OpenAI(api_key=ALICE, **settings) as client:
            assert client.models.list().data[0].id == "scripted"
            with pytest.raises(openai.RateLimitError, match="1 requests per minute"):
                client.models.list()


def test_every_prompt_of_a_batch_is_a_request(tmp_path: Path) -> None:
    """Otherwise 128 prompts in one body would count as one."""
    event = TokenEvent("x", (5,), "stop", Usage(1, 1))
    security, _, _ = limited(tmp_path, "requests_per_minute = 3")

    class Service(ScriptedService):
        async def submit(self, request: Request) -> Any:
            caller = CALLER.get()
            assert caller is not None
            return await caller.submit(request, super().submit)

    with live(Service(lambda request: [event]), security=security) as server:
        three = {"prompt": ["a", "b", "c"], "max_tokens": 1}
        assert server.call("POST", "/v1/completions", three, bearer(ALICE)).status == 200
        assert server.call("POST", "/v1/completions", three, bearer(ALICE)).status == 429
        security, _, _ = limited(tmp_path, "requests_per_minute = 2")
    with live(service := Service(lambda request: [event]), security=security) as server:
        assert server.call("POST", "/v1/completions", three, bearer(ALICE)).status == 429
        assert not service.streams, "a batch is refused as a whole"


@in_loop
async def test_grpc_calls_past_the_limit_have_a_hint(tmp_path: Path) -> None:
    """`ortolan.Client` waits for it by itself."""
    security, clock, _ = limited(tmp_path, "requests_per_minute = 2")
    async with serving(MockService(), security) as address:
        async with AsyncClient(address, api_key=ALICE, retry=NO_RETRY) as client:
            for _ in range(2):
                assert await client.generate(PROMPT, max_tokens=1)
            with pytest.raises(RateLimitError, match="2 requests per minute") as caught:
                await client.generate(PROMPT, max_tokens=1)
            assert caught.value.retry_after_s == 30
            assert isinstance(caught.value, OverloadedError)
            clock.now += 29.95
        patient = RetryPolicy(max_retries=1)
        async with AsyncClient(address, api_key=ALICE, retry=patient) as client:
            asked = asyncio.ensure_future(client.generate(PROMPT, max_tokens=1))
            await asyncio.sleep(0.02)
            clock.now += 0.05
            assert await asked


@in_loop
async def test_tokens_of_prompts_and_answers_count(tmp_path: Path) -> None:
    """Ten long answers are not ten short ones; a key that has had its tokens waits for new ones."""
    security, clock, _ = limited(tmp_path, "tokens_per_minute = 60")
    async with (
        serving(MockService(), security) as address,
        AsyncClient(address, api_key=ALICE, retry=NO_RETRY) as client,
    ):
        settings: Any = {"max_tokens": 28, "temperature": 0, "ignore_eos": True}
        for _ in range(2):  # 4 + 28 tokens each, which goes 4 below nothing
            assert await client.generate(PROMPT, **settings)
        with pytest.raises(RateLimitError, match="60 tokens per minute") as caught:
            await client.generate(PROMPT, **settings)
        assert caught.value.retry_after_s == pytest.approx(5)
        assert (await client.stats()).running == 0, "what makes no tokens is not held up"
        clock.now += 5
        assert await client.generate(PROMPT, **settings)


@in_loop
async def test_request_that_the_engine_refuses_costs_no_tokens(tmp_path: Path) -> None:
    """A prompt that is too long was never read."""
    security, _, _ = limited(tmp_path, "tokens_per_minute = 60")
    async with (
        serving(MockService(), security) as address,
        AsyncClient(address, api_key=ALICE, retry=NO_RETRY) as client,
    ):
        for _ in range(3):
            with pytest.raises(Exception, match="prompt"):
                await client.generate([5] * 500)
        assert await client.generate(PROMPT, max_tokens=1)


# The file, read again.


def test_hangup_reads_the_keys_again_and_keeps_them_if_they_cannot_be_read(
    keys_file: Path,
) -> None:
    """A key that leaked is withdrawn without a restart; a typing error locks nobody out."""
    security, said = secured(keys_file), list[str]()

    async def run() -> None:
        stop = reload_on_hangup(security, said.append)
        try:
            for text, expected in ((f'[bob]\nkey = "{BOB}"', 1), ("[bob", 2), (KEYS, 3)):
                keys_file.write_text(text)
                os.kill(os.getpid(), signal.SIGHUP)
                while len(said) < expected:
                    await asyncio.sleep(0.002)
        finally:
            stop()

    before = signal.getsignal(signal.SIGHUP)
    asyncio.run(asyncio.wait_for(run(), 30))
    assert said[0] == said[2] == "SIGHUP: the file of keys was read again"
    assert "the file of keys stays as it was: api_keys_file" in said[1]
    assert security.keys is not None
    assert len(security.keys) == 3
    assert signal.getsignal(signal.SIGHUP) == before


@in_loop
async def test_withdrawn_key_begins_nothing_even_in_a_call_that_runs(tmp_path: Path) -> None:
    """One call may ask many times, for days."""
    _, clock, file = limited(tmp_path, "requests_per_minute = 5")
    keys, service = Keys(file, clock), MockService()
    caller = keys.admit([f"Bearer {ALICE}".encode()])
    request = Request(PROMPT, SamplingParams(max_tokens=1))
    stream = await caller.submit(request, service.submit)
    file.write_text(f'[bob]\nkey = "{BOB}"')
    keys.reload()
    assert [event async for event in stream], "what runs ends in its own time"
    with pytest.raises(AuthenticationError):
        await caller.submit(request, service.submit)
    with pytest.raises(AuthenticationError):
        keys.admit([f"Bearer {ALICE}".encode()])
    await service.close()


def test_reading_again_refills_nobodys_minute(tmp_path: Path) -> None:
    """Nor does it lengthen the list of what is counted: an account a key, and no more."""
    security, _, file = limited(tmp_path, "requests_per_minute = 1")
    keys = security.keys
    assert keys is not None
    keys.admit([f"Bearer {ALICE}".encode()])
    for _ in range(3):
        keys.reload()
        with pytest.raises(RateLimitError):
            keys.admit([f"Bearer {ALICE}".encode()])
        assert len(keys) == 2
    file.write_text(file.read_text().replace("= 1", "= 2"))
    keys.reload()
    keys.admit([f"Bearer {ALICE}".encode()])


def test_strangers_leave_nothing_behind(keys_file: Path) -> None:
    """What is counted is bounded by the file, whatever is tried at the door."""
    keys = Keys(keys_file)
    for number in range(1000):
        with pytest.raises(AuthenticationError):
            keys.admit([f"Bearer guess-number-{number}".encode()])
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_told_from_the_network(host: str, expected: bool) -> None:
    """Keys in clear text on a network are worth a line at the start."""
    assert is_loopback(host) is expected
