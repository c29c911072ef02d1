"""A server's address, and a connection to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ortolan.bench.serving.grpc_wire import GrpcWire
from ortolan.bench.serving.http_wire import HttpWire
from ortolan.bench.serving.outcome import Wire
from ortolan.errors import BenchError, UsageError

if TYPE_CHECKING:
    from ortolan.client.access import AccessSettings


@dataclass(frozen=True)
class Server:
    """One that is measured. name: the address as given. path: what comes before /v1.

    protocol: "http" or "grpc"; secure: whether over TLS.
    """

    name: str
    protocol: str
    host: str
    port: int
    path: str = ""
    secure: bool = False


@dataclass(frozen=True)
class OpenServer:
    """A server that answered. model, software: what it says of itself, or empty."""

    name: str
    protocol: str
    wire: Wire
    model: str = ""
    software: str = ""


def read_address(address: str) -> Server:
    """The server at "http://host:port" or "grpc://host:port", or with https, grpcs.

    Raises UsageError.
    """
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{address} is no address ({error})") from error
    if parts.scheme not in ("http", "https", "grpc", "grpcs"):
        raise UsageError(f"{address} must begin with http://, https://, grpc:// or grpcs://")
    protocol, secure = parts.scheme[:4], parts.scheme[4:] == "s"
    if not parts.hostname or (port is None and protocol == "grpc"):
        raise UsageError(f"{address} must name host and port, as in {parts.scheme}://host:port")
    path = parts.path.rstrip("/").removesuffix("/v1")
    if parts.query or parts.fragment or parts.username or (path and protocol == "grpc"):
        raise UsageError(f"{address} has parts that mean nothing here; give host and port")
    port = port or (443 if secure else 80)
    return Server(address, protocol, parts.hostname, port, path, secure)


async def open_server(
    server: Server, ignore_eos: bool, access: AccessSettings | None = None
) -> OpenServer:
    """Connect and ask for the model. Raises BenchError if nobody answers, OrtolanError over gRPC.

    A server without /v1/models is taken as it is.
    """
    given = _access(server, access or {})
    host = f"[{server.host}]" if ":" in server.host else server.host
    if server.protocol == "grpc":
        grpc = GrpcWire(f"{host}:{server.port}", ignore_eos, given)
        try:
            model = await grpc.greet()
        except BaseException:
            await grpc.close()
            raise
        software = f"ortolan {model.server_version}"
        return OpenServer(server.name, server.protocol, grpc, model.name, software)
    http = HttpWire(server.host, server.port, server.path, ignore_eos, given)
    reply = await http.greet()
    if reply.problem is not None:
        await http.close()
        raise BenchError(
            f"{server.name} does not answer ({': '.join(reply.problem)}); is the server running?"
        )
    software = reply.response.headers.get("server", "")
    return OpenServer(server.name, server.protocol, http, http.model or "", software)


def _access(server: Server, given: AccessSettings) -> AccessSettings:
    """What of it is for this server."""
    if server.secure:
        return {**given, "tls": True}
    return {"api_key": given["api_key"]} if "api_key" in given else {}
