"""The gRPC server: its limits, health, reflection, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ortolan.errors import UsageError
from ortolan.proto.inference.v2 import grpc_predict_v2_pb2_grpc
from ortolan.proto.ortolan.v1 import ortolan_pb2_grpc
from ortolan.runtime.serve import kserve_service
from ortolan.runtime.serve.descriptors import GRPC_SHARE, most_connections
from ortolan.runtime.serve.grpc_auth import key_interceptors, server_credentials
from ortolan.runtime.serve.grpc_calls import CallInterceptor
from ortolan.runtime.serve.grpc_malformed import MalformedInterceptor
from ortolan.runtime.serve.grpc_service import NAME, InferenceServicer
from ortolan.runtime.serve.security import Security
from ortolan.runtime.serve.service import Service

# A prompt of a million tokens takes 3 MB as ids and about 5 MB as text. What is longer is refused
# by gRPC itself, before it is read, with RESOURCE_EXHAUSTED.
MAX_RECEIVE_BYTES = 8 * 2**20
# The longest answer is Tokenize's, to a text of the size above: at most 3 bytes for each byte.
MAX_SEND_BYTES = 3 * MAX_RECEIVE_BYTES + 2**20
MAX_METADATA_BYTES = 16 * 2**10

# A client that vanished without a word (a pulled cable) holds its slots for at most these two
# together. One that says goodbye, or is killed, is noticed at once.
KEEPALIVE_TIME_S = 20
KEEPALIVE_TIMEOUT_S = 10
# Clients may ask for life signs as often as this; gRPC's own limit is five minutes.
MIN_CLIENT_PING_S = 10

# Calls per connection are not limited: the client's library would hold back the rest in silence,
# where the engine's queue refuses what is too much at once, with a hint when to come back.
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_SEND_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_CLIENT_PING_S * 1000),
    # Otherwise a second server on a port in use shares it, and gets every other connection.
    ("grpc.so_reuseport", 0),
)

_NAMES = (NAME, kserve_service.NAME)

# How often readiness is looked at for whoever watches it.
_HEALTH_EVERY_S = 0.2
# Statuses that calls end with get this long to leave, after the engine has stopped.
_LAST_WORDS_S = 1.0


def _connection_limit() -> tuple[str, int]:
    """Connections past it are closed at once, so that clients see UNAVAILABLE and not silence."""
    return "grpc.max_allowed_incoming_connections", most_connections(GRPC_SHARE)


class GrpcServer:
    """Serves ortolan.v1, KServe v2, grpc.health.v1 and reflection on one port.

    start: listens, and returns the port (which `port` 0 leaves to the system). Raises UsageError
    if the address cannot be had.
    stop: call it when the engine has ended every request. Calls whose readers are slow have until
    grace_s to read what is there.
    """

    def __init__(
        self, service: Service, host: str, port: int, security: Security | None = None
    ) -> None:
        self._service = service
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._servicer = InferenceServicer(service)
        self._kserve = kserve_service.KServeServicer(service)
        self._health = health.aio.HealthServicer()
        self._security = security or Security()
        # The first sees what all others do. Keys next: who has none learns nothing of how
        # messages are read.
        interceptors = [
            CallInterceptor(service),
            *key_interceptors(self._security),
            MalformedInterceptor(),
        ]
        self._server = grpc.aio.server(
            interceptors=interceptors, options=(*_OPTIONS, _connection_limit())
        )
        ortolan_pb2_grpc.add_InferenceServiceServicer_to_server(self._servicer, self._server)
        grpc_predict_v2_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            self._kserve, self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> int:
        try:
            port: int = self._add_port()
        except RuntimeError as error:
            raise UsageError(
                f"cannot listen on {self._address} for gRPC; choose a free port and an address of "
                "this machine"
            ) from error
        await self.publish_health()
        await self._server.start()
        self._watching = asyncio.create_task(self._follow_health())
        return port

    def _add_port(self) -> int:
        tls = self._security.tls
        if tls is None:
            return int(self._server.add_insecure_port(self._address))
        return int(self._server.add_secure_port(self._address, server_credentials(tls)))

    async def stop(self, grace_s: float) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self._health.enter_graceful_shutdown()
        deadline = time.monotonic() + max(grace_s, _LAST_WORDS_S)
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        # What is left are watchers of health, streams without a request, and readers who do not
        # read.
        await self._server.stop(0.1)

    @property
    def _in_flight(self) -> int:
        return self._servicer.in_flight + self._kserve.in_flight

    async def _follow_health(self) -> None:
        while True:
            await self.publish_health()
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def publish_health(self) -> None:
        """Tell whoever watches, now rather than soon."""
        statuses = health_pb2.HealthCheckResponse
        ready = self._service.not_ready is None
        for name in ("", *_NAMES):
            await self._health.set(name, statuses.SERVING if ready else statuses.NOT_SERVING)
