"""How a client proves who it is, and whom it trusts."""

from __future__ import annotations

import ipaddress
import logging
import ssl
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import grpc

from ortolan.errors import UsageError

_logger = logging.getLogger(__name__)

File = str | PathLike[str]


class AccessSettings(TypedDict, total=False):
    """What `Client` and `AsyncClient` take beside the address; see Access."""

    tls: bool
    tls_ca: File | None
    client_cert: File | None
    client_key: File | None
    api_key: str | None


@dataclass(frozen=True)
class Access:
    """tls: whether the connection is encrypted; the files, PEM, imply it.

    tls_ca: whose certificate the server must show; None: of the authorities that gRPC knows.
    client_cert, client_key: what this client shows, where the server asks for it. api_key: sent
    with every call. Raises UsageError.
    """

    tls: bool = False
    tls_ca: File | None = None
    client_cert: File | None = None
    client_key: File | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if (self.client_cert is None) != (self.client_key is None):
            raise UsageError("client_cert and client_key go together; give both or none")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("api_key holds signs that no key has; give it as the server has it")

    def __repr__(self) -> str:
        return f"Access(tls={self.encrypted})"  # keys must not get into logs

    @property
    def encrypted(self) -> bool:
        return self.tls or self.tls_ca is not None or self.client_cert is not None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def open_channel(self, module: Any, address: str, options: Any) -> Any:
        """A channel of `grpc` or `grpc.aio`. Raises UsageError if a file cannot be used."""
        self.warn_of_plaintext(address)
        if not self.encrypted:
            return module.insecure_channel(address, options=options)
        self.context()  # what gRPC says of a bad file is of no use
        files = (self.tls_ca, self.client_key, self.client_cert)
        pem = [None if file is None else Path(file).read_bytes() for file in files]
        return module.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=options)

    def context(self) -> ssl.SSLContext:
        """The same for a client of HTTP. Raises UsageError if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
        except (ssl.SSLError, OSError) as error:
            raise _unfit(f"tls_ca {self.tls_ca}", error) from error
        if self.client_cert is not None and self.client_key is not None:
            try:
                context.load_cert_chain(self.client_cert, self.client_key, _no_password)
            except (ssl.SSLError, OSError) as error:
                files = f"client_cert {self.client_cert} and client_key {self.client_key}"
                raise _unfit(files, error) from error
        return context

    def warn_of_plaintext(self, address: str) -> None:
        """Log a warning if the key would leave this machine unencrypted."""
        if self.api_key is not None and not self.encrypted and not _is_local(address):
            _logger.warning(
                "the API key goes to %s unencrypted; use TLS, or do this in a network that you "
                "trust only",
                address,
            )


def _no_password() -> str:
    raise OSError("it is locked by a password")  # or OpenSSL would ask the terminal


def _unfit(what: str, error: Exception) -> UsageError:
    said = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
    return UsageError(f"{what} cannot be used ({said}); give files in PEM that go together")


def _is_local(address: str) -> bool:
    """Whether "host:port" is on this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost" or address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
