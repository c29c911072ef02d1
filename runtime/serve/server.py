"""A server's life: open both ports, load the model, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import reprlib
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ortolan.errors import UsageError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.serve import descriptors
from ortolan.runtime.serve.config import ServeConfig, Settings
from ortolan.runtime.serve.security import Security, open_security, reload_on_hangup
from ortolan.runtime.serve.service import Service


@dataclass(frozen=True)
class Addresses:
    """Where the servers listen, as host:port; None for one that is off."""

    grpc: str | None
    http: str | None


def check_ports(config: ServeConfig) -> None:
    """Raises UsageError if a port cannot be had, before a model is loaded for nothing."""
    for name, port in (("grpc_port", config.grpc_port), ("http_port", config.http_port)):
        if port == "off":
            continue
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                if os.name == "posix":  # as both servers do, so that old connections do not matter
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except UnicodeError as error:  # a label that is empty or too long, half a surrogate pair
            raise UsageError(
                f"host is {reprlib.repr(config.host)}, which cannot be an address; give one of "
                "this machine, such as 127.0.0.1"
            ) from error
        except OSError as error:
            raise UsageError(
                f"{name} {port} on {config.host} cannot be had ({error.strerror}); stop what "
                "listens there, or choose another port or an address of this machine"
            ) from error


def open_service(bundle: Bundle, settings: Settings) -> Service:
    """A service whose model is not loaded yet; `run` does that.

    Raises what opening a tokenizer does, and UsageError for settings that the bundle or the machine
    refuses.
    """
    from ortolan.runtime.engine.opening import check_replicas

    serve = settings.serve
    check_replicas(settings.engine, serve.replicas)
    return Service(
        bundle,
        settings.engine,
        serve.model_name,
        replicas=serve.replicas,
        heartbeat_timeout_s=serve.heartbeat_timeout,
        load=False,
        self_test=serve.self_test == "on",
    )


def sizes(service: Service) -> dict[str, int]:
    """What the loaded service uses, under the names of the settings that may leave it open.

    What is the engine's is each replica's.
    """
    from ortolan.runtime.engine.kv_cache import bytes_per_token
    from ortolan.runtime.engine.prefix_cache import BLOCK
    from ortolan.runtime.engine.thread_pool import use_threads

    stats = service.stats()
    block_bytes = BLOCK * bytes_per_token(service.manifest.model, service.manifest.dtypes.kv)
    return {
        "threads": use_threads(None),
        "max_context": service.context,
        "kv_tokens": stats.kv_budget_tokens // service.replicas,
        "prefix_cache_mb": stats.prefix_capacity_blocks * block_bytes // service.replicas // 2**20,
    }


def run(
    service: Service,
    config: ServeConfig,
    *,
    on_ready: Callable[[Addresses], None],
    say: Callable[[str], None],
    on_listening: Callable[[Addresses], None] = lambda _: None,
) -> None:
    """Listen, load the model, serve until SIGTERM or SIGINT, then drain and return.

    A second signal ends the process, as does the first one if the model is still being loaded.
    on_listening: called once, when health can be asked for. on_ready: called once, when requests
    are welcome. say: a line for whoever runs the server.
    Raises UsageError if an address cannot be had, and what loading does.
    """
    asyncio.run(serve(service, config, on_ready=on_ready, say=say, on_listening=on_listening))


async def serve(
    service: Service,
    config: ServeConfig,
    *,
    on_ready: Callable[[Addresses], None],
    say: Callable[[str], None],
    on_listening: Callable[[Addresses], None] = lambda _: None,
) -> None:
    """See `run`."""
    security = open_security(config)
    ending = _Ending()
    ending.listen()
    stop_reloading = reload_on_hangup(security, say)
    descriptors.raise_limit()
    servers: list[Any] = []
    try:
        addresses = await _start(service, config, servers, security)
        on_listening(addresses)
        if not await _loaded(service, ending):
            say(f"{ending.name}: stopped while the model was loading")
            await _stop(servers, 0.0)
            # Nothing interrupts the thread that loads, and an orderly exit would wait for it.
            os._exit(0)
        await _publish_health(servers)
        on_ready(addresses)
        await ending.first.wait()
        await _drain(service, config, servers, ending.name, say)
        say("stopped")
    finally:
        await _stop(servers, 0.0)
        await service.close()
        stop_reloading()
        ending.ignore()


async def _loaded(service: Service, ending: _Ending) -> bool:
    """Whether the model is ready, rather than a signal the first to come."""
    loading = asyncio.create_task(service.warm_up())
    signalled = asyncio.create_task(ending.first.wait())
    await asyncio.wait((loading, signalled), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        return False
    signalled.cancel()
    loading.result()
    return True


async def _drain(
    service: Service,
    config: ServeConfig,
    servers: list[Any],
    signal_name: str,
    say: Callable[[str], None],
) -> None:
    """Not ready at once, no new work after the delay, no work at all after the grace."""
    service.leave()
    await _publish_health(servers)
    if config.drain_delay > 0:
        say(f"{signal_name}: not ready; new requests are taken for {config.drain_delay:g} s more")
        await asyncio.sleep(config.drain_delay)
    running = service.stats().running + service.stats().waiting
    say(
        f"{signal_name}: no new requests; {running} running, which have {config.grace:g} s; "
        "a second signal ends now"
    )
    deadline = time.monotonic() + config.grace
    await service.drain(config.grace)
    # The engine is done; what is left is for readers to read.
    await _stop(servers, max(deadline - time.monotonic(), 0.0))


async def _publish_health(servers: list[Any]) -> None:
    for server in servers:
        await server.publish_health()


async def _stop(servers: list[Any], grace_s: float) -> None:
    """Stop all, and forget them."""
    stopping = [server.stop(grace_s) for server in servers]
    servers.clear()
    await asyncio.gather(*stopping)


async def _start(
    service: Service, config: ServeConfig, servers: list[Any], security: Security
) -> Addresses:
    grpc_address = http_address = None
    if config.grpc_port != "off":
        from ortolan.runtime.serve.grpc_server import GrpcServer

        grpc_server = GrpcServer(service, config.host, config.grpc_port, security)
        grpc_address = _address(config.host, await grpc_server.start())
        servers.append(grpc_server)
    if config.http_port != "off":
        http_server = _http_server(service, config, security)
        http_address = _address(config.host, await http_server.start())
        servers.append(http_server)
    return Addresses(grpc_address, http_address)


def _http_server(service: Service, config: ServeConfig, security: Security) -> Any:
    from importlib import import_module

    create_app = import_module("ortolan.runtime.serve.http_app").create_app
    app = create_app(service, security=security, with_page=config.chat_page == "on")
    server = import_module("ortolan.runtime.serve.http_server").HttpServer
    context = security.tls and security.tls.context
    return server(app, config.host, config.http_port, tls=context)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Ending:
    """Signals: the first sets `first`, the second ends the process at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for sig in self.SIGNALS:
            self._before[sig] = signal.getsignal(sig)
            try:
                loop.add_signal_handler(sig, self._arrived, sig)
            except NotImplementedError:  # Windows
                signal.signal(sig, lambda n, _: loop.call_soon_threadsafe(self._arrived, n))

    def ignore(self) -> None:
        loop = asyncio.get_running_loop()
        for sig, before in self._before.items():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(sig)
            signal.signal(sig, before)

    def _arrived(self, number: int) -> None:
        if self.first.is_set():
            # Not sys.exit: threads of ONNX Runtime and gRPC would be waited for.
            os._exit(128 + number)
        self.name = signal.Signals(number).name
        self.first.set()
