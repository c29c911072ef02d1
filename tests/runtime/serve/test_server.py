"""A server's life: start, signals, draining, end."""

from __future__ import annotations

import asyncio
import http.client
import json
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
BODY = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, "ignore_eos": True}

posix = pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")


class Running:
    """A server in a process of its own, and clients of it."""

    def __init__(self, **settings: float) -> None:
        tests = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-P", PROGRAM, json.dumps(settings)],
            env={**os.environ, "PYTHONPATH": tests},
            stdout=subprocess.PIPE,
            text=True,
        )
        addresses = json.loads(self.next_line())
        self.client = Client(addresses["grpc"], retry=NO_RETRY)
        host, _, port = addresses["http"].rpartition(":")
        self._http = (host, int(port))
        self._connections: list[http.client.HTTPConnection] = []

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def http(self, method: str, path: str, **fields: Any) -> http.client.HTTPResponse:
        """An exchange on a connection of its own, whose body is still to be read."""
        connection = http.client.HTTPConnection(*self._http, timeout=60)
        self._connections.append(connection)
        body = json.dumps({**BODY, **fields}) if method == "POST" else None
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def stream(self) -> http.client.HTTPResponse:
        """A streamed completion whose first event has come."""
        response = self.http("POST", "/v1/completions", stream=True)
        assert response.readline().startswith(b"data: {")
        return response

    def end(self) -> None:
        for connection in self._connections:
            connection.close()
        self.client.close()
        self.process.kill()
        with self.process:
            pass


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server. `step_s`: what a decode step takes; `load_s`: what loading takes."""
    started: list[Running] = []

    def run(*, step_s: float = 0.02, load_s: float = 0.0, **config: float) -> Running:
        started.append(running := Running(step_s=step_s, load_s=load_s, **config))
        if not load_s:
            assert running.next_line() == "ready"
        return running

    yield run
    for one in started:
        one.end()


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_lets_streams_end_and_turns_new_calls_away(
    start: Start, number: signal.Signals
) -> None:
    """vllm#34730: a rolling update must not cost an answer, over either protocol."""
    running = start(grace=60)
    stream, http_stream = running.client.stream(PROMPT, **LONG), running.stream()
    next(stream)
    running.process.send_signal(number)
    assert number.name in running.next_line()
    assert running.client.stats().not_ready == "the server is shutting down"
    with pytest.raises(EngineError, match="shutting down"):
        running.client.generate(PROMPT, max_tokens=1)
    assert running.http("GET", "/health/live").status == 200
    assert running.http("GET", "/health/ready").status == 503
    refused = running.http("POST", "/v1/completions")
    assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
    assert list(stream)[-1].finish_reason == "length"
    events = http_stream.read()
    assert b'"finish_reason":"length"' in events.replace(b" ", b"")
    assert events.endswith(b"data: [DONE]\n\n")
    assert running.process.wait(60) == 0


@posix
def test_streams_that_outlast_the_grace_end_with_an_error(start: Start) -> None:
    """A stream that is cut without a word looks like a network fault; and the exit is in order."""
    running = start(grace=0.1, step_s=0.2)
    stream, http_stream = running.client.stream(PROMPT, **LONG), running.stream()
    next(stream)
    running.process.send_signal(signal.SIGTERM)
    with pytest.raises(EngineError, match="the engine was closed"):
        list(stream)
    *_, last = http_stream.read().strip().split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert running.process.wait(60) == 0


@posix
def test_second_signal_ends_the_process_at_once(start: Start) -> None:
    """Whoever presses Ctrl-C twice means it; a step that hangs must not hold the process."""
    running = start(grace=3600, step_s=3600)
    # The step that hangs may be the first, so no event is waited for.
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(running.client.generate, PROMPT, n=2, **LONG)
        while running.client.stats().running < 2 and not stream.done():
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        assert "a second signal ends now" in running.next_line()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 128 + signal.SIGINT
        with pytest.raises(EngineError):
            stream.result(60)


@posix
def test_signal_while_the_model_loads_ends_the_process_in_order(start: Start) -> None:
    """An orchestrator that changes its mind must not wait for a model, nor see a failure."""
    running = start(load_s=3600)
    assert running.http("GET", "/health/ready").status == 503
    running.process.send_signal(signal.SIGTERM)
    assert running.next_line() == "SIGTERM: stopped while the model was loading"
    assert running.process.wait(60) == 0
    assert running.next_line() == ""  # not "ready"


@posix
def test_second_signal_ends_the_delay_too(start: Start) -> None:
    """The delay is for load balancers; who is in a hurry has none in front."""
    running = start(drain_delay=3600)
    running.process.send_signal(signal.SIGTERM)
    assert "new requests are taken for 3600 s more" in running.next_line()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 128 + signal.SIGTERM


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

    async def publish_health(self) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        self.stopped.append(grace_s)


@pytest.fixture
def fake_http(monkeypatch: pytest.MonkeyPatch) -> type[_Http]:
    app, http_server = ModuleType("app"), ModuleType("server")
    app.create_app = lambda service, **settings: ("app", service)  # type: ignore[attr-defined]
    http_server.HttpServer = _Http  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ortolan.runtime.serve.http_app", app)
    monkeypatch.setitem(sys.modules, "ortolan.runtime.serve.http_server", http_server)
    return _Http


@in_loop
async def test_both_servers_start_warm_and_stop_together(fake_http: type[_Http]) -> None:
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
    assert fake_http.made is not None
    assert fake_http.made.app == ("app", service)
    assert len(fake_http.made.stopped) == 1
    assert ready[0].http == "127.0.0.1:4321"
    assert (ready[0].grpc or "").startswith("127.0.0.1:")
    assert said[-1] == "stopped"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@in_loop
async def test_server_whose_second_port_fails_leaves_nothing_running(
    fake_http: type[_Http],
) -> None:
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
