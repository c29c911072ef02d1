"""Clients that leave, stall, talk nonsense or never finish, and a server that stops."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from http_live import Live, http_request, live, read_all, wait_until
from scripted_service import ScriptedService

from ortolan.errors import UsageError
from ortolan.runtime.params import TokenEvent, Usage
from ortolan.runtime.serve import http_protocol
from ortolan.runtime.serve.http_body import HttpLimits
from ortolan.runtime.serve.http_server import HttpServer

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "x", "ignore_eos": True, "temperature": 0}
ONE_TOKEN = TokenEvent("a", (1,))
DONE = TokenEvent("a", (1,), "stop", Usage(1, 1))


def running(server: Live) -> int:
    return int(server.service.stats().running)


def waiting(server: Live) -> int:
    return int(server.service.stats().waiting)


def cancelled(server: Live) -> int:
    return int(server.service.stats().ended.get("cancelled", 0))


@contextmanager
def scripted(
    *events: TokenEvent, limits: HttpLimits | None = None, max_connections: int = 64
) -> Iterator[Live]:
    """Every request gets these events; without a finish reason it then waits for ever."""
    with live(ScriptedService(lambda _: events), limits, max_connections) as server:
        yield server


# ── Leaving ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompts", [1, 2])
def test_leaving_client_frees_all_its_slots(
    server: Live, stream: bool, n: int, prompts: int
) -> None:
    """llama.cpp#24496, vllm#14326: a slot that writes for nobody is a slot that others lack."""
    before, answers = cancelled(server), n * prompts
    body = {**ENDLESS, "prompt": ["x", "y"][:prompts], "n": n, "stream": stream}
    with server.raw(http_request(COMPLETIONS, body)) as client:
        wait_until(lambda: running(server) == min(answers, 4))
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
    wait_until(lambda: running(server) == waiting(server) == 0)
    assert cancelled(server) == before + answers


def test_client_that_leaves_the_queue_frees_its_place(server: Live) -> None:
    """A request that waits has nobody to notice its client's leaving but the server."""
    with server.raw(http_request(COMPLETIONS, {**ENDLESS, "n": 4})):
        wait_until(lambda: running(server) == 4)
        for stream in (True, False):
            with server.raw(http_request(COMPLETIONS, {**ENDLESS, "n": 2, "stream": stream})):
                wait_until(lambda: waiting(server) == 2)
            wait_until(lambda: waiting(server) == 0)
            assert running(server) == 4


CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="x")
for event in client.completions.create(
    model="tiny", prompt="x", n=4, stream=True, extra_body={"ignore_eos": True}
):
    print(event.id, flush=True)
    sys.stdin.read()
"""


def test_killed_client_frees_its_slot(server: Live) -> None:
    """A process that is killed says no goodbye."""
    before = cancelled(server)
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"{server.url}/v1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"cmpl-")
        process.kill()
        process.wait(30)
    wait_until(lambda: running(server) == 0)
    assert cancelled(server) == before + 4


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_is_noticed_between_tokens(stream: bool) -> None:
    """A model that thinks long writes nothing by which a leaving would show."""
    with scripted(ONE_TOKEN) as server:
        with server.raw(http_request(COMPLETIONS, {"prompt": "x", "stream": stream})):
            wait_until(lambda: len(server.service.streams) == 1)
        wait_until(lambda: server.service.streams == [])
        assert server.service.cancelled == 1


def test_leaving_while_the_prompt_is_read_submits_nothing() -> None:
    """A long prompt is tokenized for a while, and nobody may be there at its end."""
    with scripted(DONE) as server:
        service, begun = server.service, []

        async def slow(prompt: Any) -> list[int]:
            begun.append(prompt)
            await asyncio.Event().wait()
            return [5]

        service.encode = slow
        with server.raw(http_request(COMPLETIONS, {"prompt": "x"})):
            wait_until(lambda: begun == ["x"])
        wait_until(lambda: not server.server._server.server_state.tasks)
        assert (service.streams, service.cancelled) == ([], 0)


@pytest.mark.parametrize("stream", [True, False])
def test_deadline_ends_a_request(server: Live, stream: bool) -> None:
    """grpc#43360: the slot is free when time is over, and the client is told so."""
    body = {**ENDLESS, "timeout_s": 0.1, "stream": stream}
    answered = server.post(COMPLETIONS, body)
    if answered.status == 200:  # the first token was earlier
        *_, last = [line for line in answered.body.split(b"\n") if line]
        assert json.loads(last[5:])["error"]["type"] == "timeout_error"
    else:
        assert (answered.status, answered.error["type"]) == (504, "timeout_error")
    assert running(server) == 0


def test_full_queue_says_when_to_come_back(server: Live) -> None:
    """vllm#49445: past the cap the answer is at once, and helps the client to wait."""
    with server.raw(http_request(COMPLETIONS, {**ENDLESS, "n": 16})):
        wait_until(lambda: (running(server), waiting(server)) == (4, 12))
        answered = server.post(COMPLETIONS, {"prompt": "x", "n": 5})  # at most 16 may wait
        assert (answered.status, answered.error["type"]) == (429, "rate_limit_error")
        assert int(answered.headers["retry-after"]) >= 1


# ── Slow and silent ────────────────────────────────────────────────────────────────────────────


def test_slow_reader_gets_all_and_holds_little() -> None:
    """vllm#56094: what a client does not read must not pile up in the server."""
    text = "x" * (1 << 20)
    events = [TokenEvent(text, (1,))] * 15 + [TokenEvent(text, (1,), "stop", Usage(1, 16))]
    with scripted(*events) as server:
        body = {"prompt": "x", "stream": True}
        with server.raw(http_request(COMPLETIONS, body), receive_buffer=1 << 16) as client:
            (connection,) = wait_for_connections(server)
            wait_until(lambda: connection.flow.write_paused)
            size = connection.transport.get_write_buffer_size()
            assert size < 3 << 20
            assert server.post(COMPLETIONS, {"prompt": "x"}).status == 200  # others are served
            assert connection.transport.get_write_buffer_size() == size
            received = bytearray()
            while not received.endswith(b"0\r\n\r\n"):
                received += client.recv(1 << 20)
    assert received.count(b"x" * (1 << 20)) == 16
    assert b"[DONE]" in received


def test_reader_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes nothing for a minute is gone, whatever its socket says."""
    monkeypatch.setattr(http_protocol, "_STALL_TIMEOUT_S", 0.2)
    events = [TokenEvent("x" * (1 << 20), (1,))] * 20
    with scripted(*events) as server:
        body = {"prompt": "x", "stream": True}
        with server.raw(http_request(COMPLETIONS, body), receive_buffer=4096):
            wait_until(lambda: server.service.cancelled == 1)
            wait_until(lambda: not server.server._server.server_state.connections)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Ty",
        http_request(COMPLETIONS, {"prompt": "x"})[:-3],
    ],
)
def test_half_a_request_ends(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Connections that never ask would use up those that a server may hold."""
    monkeypatch.setattr(http_protocol, "_REQUEST_TIMEOUT_S", 0.2)
    with scripted(DONE) as server:
        with server.raw(sent) as client:
            assert read_all(client).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        wait_until(lambda: not server.server._server.server_state.tasks)
        assert server.service.cancelled == 0


def test_patience_is_with_requests_not_with_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may take its time, and an idle connection may be used again."""
    monkeypatch.setattr(http_protocol, "_REQUEST_TIMEOUT_S", 0.2)
    request = http_request(COMPLETIONS, {"prompt": "x", "stream": True})
    with scripted(ONE_TOKEN) as server, server.raw(request) as client:
        wait_until(lambda: len(server.service.streams) == 1)
        time.sleep(0.5)
        (stream,) = server.service.streams
        server.loop.call_soon_threadsafe(stream.put, DONE)
        server.loop.call_soon_threadsafe(server.service.finish, stream, None)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += client.recv(1000)
        time.sleep(0.5)
        server.service.script = lambda _: [DONE]
        client.sendall(http_request(COMPLETIONS, {"prompt": "x"}))
        assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")


# ── Nonsense ───────────────────────────────────────────────────────────────────────────────────


def test_garbage_after_a_request_ends_it() -> None:
    """What cannot be read cannot be followed by anything; the slot must not be kept for it."""
    with scripted(ONE_TOKEN) as server:
        body = {"prompt": "x", "stream": True}
        with server.raw(http_request(COMPLETIONS, body)) as client:
            wait_until(lambda: len(server.service.streams) == 1)
            client.sendall(b"\0\1\2 what is this\r\n\r\n")
            read_all(client)
        wait_until(lambda: server.service.streams == [])
        assert server.service.cancelled == 1


def test_second_request_in_advance_is_left_to_be_sent_again() -> None:
    """Queued behind the first, it would hide from us that its client has left."""
    with scripted(DONE) as server:
        two = http_request(COMPLETIONS, {"prompt": "x"}) + http_request("/v1/x", {"y": "z" * 99})
        with server.raw(two) as client:
            received = read_all(client)
        assert received.count(b"HTTP/1.1") == received.count(b"HTTP/1.1 200 OK") == 1
    with scripted(ONE_TOKEN) as server:
        with server.raw(two):
            wait_until(lambda: len(server.service.streams) == 1)
        wait_until(lambda: server.service.cancelled == 1)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01 this is TLS", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: t\r\nX: " + b"x" * 70_000, b"431"),
        (b"GET / HTTP/1.1\r\nHost: t\r\n" + b"X: y\r\n" * 12_000, b"431"),
        (b"GET /" + b"x" * 70_000, b"431"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
    ],
)
def test_nonsense_is_answered_and_the_connection_closed(sent: bytes, status: bytes) -> None:
    """A head without end must not become memory without end."""
    with scripted(DONE) as server, server.raw() as client:
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent)
        assert read_all(client)[:12] == b"HTTP/1.1 " + status


@pytest.mark.parametrize("size", [60_000, 70_000, 100_000, 200_000])
@pytest.mark.parametrize("in_one_piece", [True, False])
def test_head_that_is_too_long_is_refused_however_it_comes(size: int, in_one_piece: bool) -> None:
    """A complete head was let through, whatever its size, where it came in one read; and a body
    that comes with its head does not make that head long.
    """
    request = http_request(COMPLETIONS, {"prompt": "x"}, "X: " + "x" * size + "\r\n")
    with scripted(DONE) as server, server.raw() as client:
        with suppress(BrokenPipeError, ConnectionResetError):
            pieces = [request] if in_one_piece else [request[:100], request[100:]]
            for piece in pieces:
                client.sendall(piece)
        assert client.recv(12) == b"HTTP/1.1 " + (b"431" if size > 1 << 16 else b"200")
    body = {"prompt": "x" * size}
    with scripted(DONE) as server, server.raw(http_request(COMPLETIONS, body)) as client:
        assert client.recv(12) == b"HTTP/1.1 200"


def test_connections_past_the_limit_are_turned_away() -> None:
    """Whoever opens many must not take the server's memory with them."""
    with scripted(DONE, max_connections=2) as server, server.raw(), server.raw() as second:
        wait_for_connections(server, 2)
        with server.raw() as third:  # at once: one that asks nothing takes its place too
            assert read_all(third).startswith(b"HTTP/1.1 503")
        second.sendall(http_request(COMPLETIONS, {"prompt": "x"}))
        assert second.recv(12) == b"HTTP/1.1 200"


def test_too_long_a_body_is_refused_before_it_comes() -> None:
    """The limit holds with a stated length, without one, and for who asks first."""
    limits = HttpLimits(body_bytes=1000)
    head = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (600, b" " * 600)
    with scripted(DONE, limits=limits) as server:
        for sent in (
            f"{head}Content-Length: 1001\r\n\r\n".encode(),
            f"{head}Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n".encode(),
            f"{head}Content-Length: {'9' * 18}\r\n\r\n".encode(),
            f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk + chunk,
        ):
            with server.raw(sent) as client:
                assert client.recv(12) == b"HTTP/1.1 413"


def test_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    """curl does so with bodies of more than a kilobyte."""
    with scripted(DONE) as server:
        request = http_request(COMPLETIONS, {"prompt": "x"}, "Expect: 100-continue\r\n")
        head, _, body = request.partition(b"\r\n\r\n")
        with server.raw(head + b"\r\n\r\n") as client:
            assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(body)
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK")


# ── Stopping ───────────────────────────────────────────────────────────────────────────────────


def test_stopping_lets_answers_end_and_then_ends_them() -> None:
    """vllm#34730: what is running gets its time, and then an error, never just silence."""
    with scripted(ONE_TOKEN) as server:
        with (
            server.raw(http_request(COMPLETIONS, {"prompt": "x", "stream": True})) as streaming,
            server.raw(http_request(COMPLETIONS, {"prompt": "x"})) as whole,
        ):
            wait_until(lambda: len(server.service.streams) == 2)
            server.run(server.server.stop(0.2))
            assert server.service.cancelled == 2
            *_, last = [line for line in read_all(streaming).split(b"\n") if line[:5] == b"data:"]
            assert "shutting down" in json.loads(last[5:])["error"]["message"]
            assert read_all(whole).startswith(b"HTTP/1.1 503")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        server.run(server.server.stop(0.2))


def test_stopping_ends_idle_connections_at_once() -> None:
    """A client's pool of connections must not keep a server from stopping."""
    with scripted(DONE) as server, server.raw(http_request(COMPLETIONS, {"prompt": "x"})) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
        with server.raw(b"POST /v1") as half:
            wait_for_connections(server, 2)
            server.run(server.server.stop(20.0))
            read_all(client)
            read_all(half)


def test_port_in_use_is_said_plainly() -> None:
    """Two servers on one port is the commonest mistake of all."""
    with scripted(DONE) as server:
        second = HttpServer(lambda *_: None, "127.0.0.1", server.port)  # type: ignore[arg-type,return-value]  # never called
        with pytest.raises(UsageError, match=f"HTTP port {server.port} on 127.0.0.1"):
            server.run(second.start())


def wait_for_connections(server: Live, count: int = 1) -> tuple[Any, ...]:
    """The server's connections, once there are so many."""
    held: Callable[[], tuple[Any, ...]] = lambda: tuple(  # noqa: E731
        server.server._server.server_state.connections
    )
    wait_until(lambda: len(held()) == count)
    return held()
