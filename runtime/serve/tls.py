"""The server's certificate, checked before anybody connects."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import UsageError
from ortolan.runtime.serve.config import ServeConfig

# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_NOT_YET_VALID, _EXPIRED = 9, 10


@dataclass(frozen=True)
class Tls:
    """What both servers need. context: for HTTP; the rest, PEM, for gRPC, which reads it anew.

    client_ca: whose certificates clients must show; None for no matter.
    """

    context: ssl.SSLContext
    certificate: bytes
    key: bytes
    client_ca: bytes | None


def open_tls(config: ServeConfig) -> Tls | None:
    """None without a certificate.

    Raises UsageError if a file cannot be read or is of the wrong kind, if certificate and key do
    not belong together, and if the certificate's time is over or yet to come.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    certificate = _read("tls_cert", config.tls_cert)
    key = _read("tls_key", config.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # at least TLS 1.2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(_unfit_pair(config, error)) from error
    _check_time(context, certificate, config.tls_cert)
    client_ca = None
    if config.tls_client_ca is not None:
        client_ca = _read("tls_client_ca", config.tls_client_ca)
        try:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"tls_client_ca {config.tls_client_ca} holds no certificate; give one in PEM"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return Tls(context, certificate, key, client_ca)


def _read(name: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{name} {file} cannot be read ({error.strerror})") from error


class _NeedsPasswordError(OSError):
    pass


def _no_password() -> str:
    raise _NeedsPasswordError  # or OpenSSL would ask the terminal, and a service has none


def _unfit_pair(config: ServeConfig, error: Exception) -> str:
    if isinstance(error, _NeedsPasswordError):
        return f"tls_key {config.tls_key} is locked by a password; give one without"
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return f"tls_key {config.tls_key} does not belong to the certificate {config.tls_cert}"
    said = f" ({reason.replace('_', ' ').lower()})" if reason else ""
    return (
        f"tls_cert {config.tls_cert} and tls_key {config.tls_key} cannot be used{said}; give a "
        "certificate and its private key, both in PEM"
    )


def _check_time(context: ssl.SSLContext, certificate: bytes, file: str) -> None:
    """Shake hands with ourselves, since the library reads a certificate's dates in no other way."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cadata=certificate.decode("ascii", "ignore"))
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # itself is all that it is held against
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        context.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(2):  # the certificate comes with the server's first words
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
            raise UsageError(
                f"tls_cert {file} is not valid now ({error.verify_message}); renew it, or set the "
                "clock"
            ) from error
