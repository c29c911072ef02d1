"""The server's certificate, checked before anybody connects."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from ortolan.errors import UsageError
from ortolan.runtime.serve.config import ServeConfig

# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_NOT_YET_VALID, _EXPIRED = 9, 10


class Tls:
    """What both servers speak TLS with. context: for HTTP; certificate, key, client_ca: PEM, for
    gRPC. client_ca: whose certificates clients must show; None for no matter.

    Raises UsageError if a file cannot be read or is of the wrong kind, if certificate and key do
    not belong together, and if the certificate's time is over or yet to come.
    """

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str | None) -> None:
        self._files = cert_file, key_file
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # at least TLS 1.2
        self.reload()
        self.client_ca: bytes | None = None
        if client_ca_file is not None:
            self.client_ca = _read("tls_client_ca", client_ca_file)
            try:
                self.context.load_verify_locations(cadata=self.client_ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise UsageError(
                    f"tls_client_ca {client_ca_file} holds no certificate; give one in PEM"
                ) from error
            self.context.verify_mode = ssl.CERT_REQUIRED

    def reload(self) -> None:
        """Read certificate and key again, for connections from now on.

        Raises UsageError, and they stay as they were.
        """
        cert_file, key_file = self._files
        certificate, key = _read("tls_cert", cert_file), _read("tls_key", key_file)
        tried = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load(tried, cert_file, key_file)
        _check_time(tried, certificate, cert_file)
        _load(self.context, cert_file, key_file)
        self.certificate, self.key = certificate, key


def open_tls(config: ServeConfig) -> Tls | None:
    """None without a certificate. Raises UsageError as Tls does."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls(config.tls_cert, config.tls_key, config.tls_client_ca)


def _read(name: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{name} {file} cannot be read ({error.strerror})") from error


class _NeedsPasswordError(OSError):
    pass


def _no_password() -> str:
    raise _NeedsPasswordError  # or OpenSSL would ask the terminal, and a service has none


def _load(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(_unfit_pair(cert_file, key_file, error)) from error


def _unfit_pair(cert_file: str, key_file: str, error: Exception) -> str:
    if isinstance(error, _NeedsPasswordError):
        return f"tls_key {key_file} is locked by a password; give one without"
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return f"tls_key {key_file} does not belong to the certificate {cert_file}"
    said = f" ({reason.replace('_', ' ').lower()})" if reason else ""
    return (
        f"tls_cert {cert_file} and tls_key {key_file} cannot be used{said}; give a certificate "
        "and its private key, both in PEM"
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
