"""uvicorn on a loop that is not its own: no signal handlers, bounded heads, stalls and waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from ortolan.errors import EngineError, UsageError
from ortolan.runtime.serve.descriptors import HTTP_SHARE, most_connections
from ortolan.runtime.serve.http_protocol import GuardedProtocol

_LAST_WORDS_S = 1.0


class HttpServer:
    """Serves an ASGI application at an address. For one event loop; start once, stop once.

    max_connections: past it, connections are answered with 503 and closed; fewer where the
    process may not open so many. tls: what HTTPS is spoken with; None for HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        max_connections: int = 1024,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        max_connections = min(max_connections, most_connections(HTTP_SHARE))
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=max_connections + 1,  # uvicorn refuses the one that reaches it
            # Longer than clients keep idle connections, so that none closes under a request.
            timeout_keep_alive=75,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
            # Accepted in one go, before any of them can be refused: within the spare descriptors.
            backlog=100,
        )
        self._config = config
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen; the port, which is a free one if 0 was asked for.

        Raises UsageError if the address cannot be had.
        """
        listener = _listen(self._host, self._port)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]), name="ortolan-http")
        while not self._server.started:
            await asyncio.wait((self._task,), timeout=0.005)
            if self._task.done():
                self._task.result()
                raise EngineError("the HTTP server ended while it started")
        return port

    async def publish_health(self) -> None:
        """Nothing: over HTTP, health is asked for."""

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new; answers may go on for `grace_s`, then their connections end."""
        if self._task is None:
            return
        self._config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]  # any number does
        self._server.should_exit = True
        await self._task
        self._task = None
        state = self._server.server_state
        if state.tasks:  # cancelled; each still says so to its client
            await asyncio.wait(tuple(state.tasks), timeout=_LAST_WORDS_S)
        for connection in tuple(state.connections):
            assert isinstance(connection, GuardedProtocol)
            connection.end()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are our own process's business


def _listen(host: str, port: int) -> socket.socket:
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as exc:
        if listener is not None:
            listener.close()
        raise UsageError(
            f"HTTP port {port} on {host} cannot be had ({exc.strerror}); stop what listens there, "
            "or choose another port"
        ) from exc
    listener.setblocking(False)
    return listener
