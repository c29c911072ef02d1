"""A live HTTP server inside the test process, and raw connections to it, all bounded in time."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ortolan.runtime.serve.http_app import create_app
from ortolan.runtime.serve.http_body import HttpLimits
from ortolan.runtime.serve.http_server import HttpServer
from ortolan.runtime.serve.security import Security

PATIENCE_S = 30.0


@dataclass
class Live:
    """A served service. Its loop runs on a thread of its own."""

    service: Any
    server: HttpServer
    loop: asyncio.AbstractEventLoop
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> Answered:
        """One plain exchange; `body` is sent as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return Answered(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answered:
        """POST."""
        return self.call("POST", path, body, headers)

    @contextmanager
    def raw(self, sent: bytes = b"", receive_buffer: int | None = None) -> Iterator[socket.socket]:
        """A bare connection that has sent some bytes."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(PATIENCE_S)
        try:
            connection.connect(("127.0.0.1", self.port))
            connection.sendall(sent)
            yield connection
        finally:
            connection.close()


@dataclass(frozen=True)
class Answered:
    """An answer's status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, of which all four members are there."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def http_request(path: str, body: object, headers: str = "") -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n{headers}\r\n"
    )
    return head.encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails the test if it does not become true in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


@contextmanager
def live(
    service: Any,
    limits: HttpLimits | None = None,
    max_connections: int = 64,
    security: Security | None = None,
) -> Iterator[Live]:
    """Serves `service` at a free port of the loopback; does not close it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="http-live", daemon=True)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)

    tls = security.tls.context if security is not None and security.tls is not None else None
    app = create_app(service, limits, security)
    server = HttpServer(app, "127.0.0.1", 0, max_connections, tls)
    try:
        yield Live(service, server, loop, run(server.start()))
    finally:
        run(server.stop(1.0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()
