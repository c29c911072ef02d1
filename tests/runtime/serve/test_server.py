"""A server's life: start, signals, draining, end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from grpc_serving import LONG, NO_RETRY, PROMPT, MockService, in_loop

from ortolan.client.sync import Client
from ortolan.errors import EngineError, UsageError
from ortolan.runtime.serve import server
from ortolan.runtime.serve.config import ServeConfig

PROGRAM = Path(__file__).with_name("serve_mock.py")
Start = Callable[..., "tuple[subprocess.Popen[str], Client]"]

posix = pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server and a client of it. `step_s`: what a decode step takes."""
    started: list[Any] = []

    def run(*, grace: float, step_s: float = 0.02) -> tuple[subprocess.Popen[str], Client]:
        tests = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [sys.executable, "-P", PROGRAM, str(grace), str(step_s)],
            env={**os.environ, "PYTHONPATH": tests},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        client = Client(process.stdout.readline().strip(), retry=NO_RETRY)
        started.append(client)
        return process, client

    yield run
    for one in started:
        if isinstance(one, Client):
            one.close()
        else:
            one.kill()
            with one:
                pass


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_lets_streams_end_and_turns_new_calls_away(
    start: Start, number: signal.Signals
) -> None:
    """vllm#34730: a rolling update must not cost an answer."""
    process, client = start(grace=60)
    stream = client.stream(PROMPT, **LONG)
    next(stream)
    process.send_signal(number)
    assert process.stdout is not None
    assert number.name in process.stdout.readline()
    assert client.stats().not_ready == "the server is shutting down"
    with pytest.raises(EngineError, match="shutting down"):
        client.generate(PROMPT, max_tokens=1)
    events = list(stream)
    assert events[-1].finish_reason == "length"
    assert process.wait(60) == 0


@posix
def test_streams_that_outlast_the_grace_end_with_an_error(start: Start) -> None:
    """A stream that is cut without a word looks like a network fault; and the exit is in order."""
    process, client = start(grace=0.1, step_s=0.2)
    stream = client.stream(PROMPT, **LONG)
    next(stream)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(EngineError, match="the engine was closed"):
        list(stream)
    assert process.wait(60) == 0


@posix
def test_second_signal_ends_the_process_at_once(start: Start) -> None:
    """Whoever presses Ctrl-C twice means it; a step that hangs must not hold the process."""
    process, client = start(grace=3600, step_s=3600)
    # The step that hangs may be the first, so no event is waited for.
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(client.generate, PROMPT, n=2, **LONG)
        while client.stats().running < 2 and not stream.done():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert "a second signal ends now" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        with pytest.raises(EngineError):
            stream.result(60)


class _Http:
    """In the place of the HTTP server."""

    made: _Http | None = None

    def __init__(self, app: Any, host: str, port: int, tls: Any) -> None:
        self.app, self.host, self.port = app, host, port
        self.stopped: list[float] = []
        _Http.made = self

    async def start(self) -> int:
        if self.port == 1:
            raise UsageError("cannot listen")
        return 4321

    async def stop(self, grace_s: float) -> None:
        self.stopped.append(grace_s)


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> type[_Http]:
    app, http_server = ModuleType("app"), ModuleType("server")
    app.create_app = lambda service, **settings: ("app", service)  # type: ignore[attr-defined]
    http_server.HttpServer = _Http  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ortolan.runtime.serve.http_app", app)
    monkeypatch.setitem(sys.modules, "ortolan.runtime.serve.http_server", http_server)
    return _Http


@in_loop
async def test_both_servers_start_warm_and_stop_together(http: type[_Http]) -> None:
    """The one must not outlive the other, nor take requests before the model is warm."""
    service = MockService()
    service._warm = False
    ready: list[server.Addresses] = []

    def on_ready(addresses: server.Addresses) -> None:
        assert service.not_ready is None
        ready.append(addresses)
        os.kill(os.getpid(), signal.SIGTERM)

    said: list[str] = []
    config = ServeConfig(grpc_port=0, http_port=0, grace=5)
    await server.serve(service, config, on_ready=on_ready, say=said.append)
    assert http.made is not None
    assert http.made.app == ("app", service)
    assert len(http.made.stopped) == 1
    assert ready[0].http == "127.0.0.1:4321"
    assert (ready[0].grpc or "").startswith("127.0.0.1:")
    assert said[-1] == "stopped"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@in_loop
async def test_server_whose_second_port_fails_leaves_nothing_running(http: type[_Http]) -> None:
    """Half a server is worse than none: it looks alive."""
    service = MockService()
    config = ServeConfig(grpc_port=0, http_port=1)
    with pytest.raises(UsageError, match="cannot listen"):
        await server.serve(service, config, on_ready=lambda _: None, say=lambda _: None)
    assert not service._engine._thread.is_alive()


def test_port_in_use_is_found_before_a_model_is_loaded() -> None:
    """Loading a large model takes a minute, which is a long way to a typing error."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"grpc_port {port} on"):
            server.check_ports(ServeConfig(grpc_port=port))
        server.check_ports(ServeConfig(grpc_port=0, http_port="off"))
    with pytest.raises(UsageError, match=r"on no-such-host\.invalid cannot be had"):
        server.check_ports(ServeConfig(host="no-such-host.invalid"))
    for host in ("\udcff", "a" * 80 + ".x"):
        with pytest.raises(UsageError, match="which cannot be an address"):
            server.check_ports(ServeConfig(host=host, grpc_port=0, http_port=0))


@in_loop
async def test_engine_that_is_gone_does_not_hold_up_the_end() -> None:
    """A broken engine is when a restart is wanted most."""
    service = MockService()

    def on_ready(addresses: server.Addresses) -> None:
        service._engine._tell(lambda: service._engine._engine.stop("gone"))
        os.kill(os.getpid(), signal.SIGTERM)

    config = ServeConfig(grpc_port=0, http_port="off", grace=3600)
    await asyncio.wait_for(server.serve(service, config, on_ready=on_ready, say=lambda _: None), 30)
