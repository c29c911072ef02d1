"""The server's certificate: what is refused at the start, and what clients must show."""

from __future__ import annotations

import http.client
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

import asyncio

from certificates import Certificates
from grpc_serving import NO_RETRY, PROMPT, MockService, in_loop, serving
from http_live import live
from scripted_service import ScriptedService

from ortolan.client.aio import AsyncClient
from ortolan.client.sync import Client
from ortolan.errors import EngineError, UsageError
from ortolan.runtime.serve.config import ServeConfig
from ortolan.runtime.serve.security import Security, open_security

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def secured(certificates: Certificates, mutual: bool = False) -> Security:
    return open_security(
        ServeConfig(
            tls_cert=certificates["server.pem"],
            tls_key=certificates["server.key"],
            tls_client_ca=certificates["ca.pem"] if mutual else None,
        )
    )


@pytest.mark.parametrize(
    ("cert", "key", "ca", "said"),
    [
        ("server.pem", "client.key", None, "does not belong to the certificate"),
        ("expired.pem", "expired.key", None, "is not valid now (certificate has expired)"),
        ("absent.pem", "server.key", None, "tls_cert"),
        ("server.pem", "absent.key", None, "absent.key cannot be read (No such file"),
        ("server.key", "server.key", None, "both in PEM"),
        ("server.pem", "locked.key", None, "is locked by a password"),
        ("server.pem", "server.key", "absent.pem", "absent.pem cannot be read"),
        ("server.pem", "server.key", "ca.key", "holds no certificate"),
        ("server.pem", None, None, "tls_cert means nothing without tls_key"),
        (None, "server.key", None, "tls_key means nothing without tls_cert"),
        (None, None, "ca.pem", "tls_client_ca means nothing without tls_cert"),
    ],
)
def test_unfit_files_are_refused_in_one_sentence(
    certificates: Certificates, cert: str | None, key: str | None, ca: str | None, said: str
) -> None:
    """A server that starts with a bad certificate is found out by its clients, one by one."""
    if key == "locked.key":
        made = ("-in", "server.key", "-out", "locked.key", "-passout", "pass:secret")
        certificates.openssl("pkcs8", "-topk8", *made)
    files = [None if name is None else certificates[name] for name in (cert, key, ca)]
    config = ServeConfig(tls_cert=files[0], tls_key=files[1], tls_client_ca=files[2])
    with pytest.raises(UsageError) as caught:
        open_security(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_certificate_is_found_before_the_model_is_loaded(
    certificates: Certificates, tmp_path: Path, run_cli: RunCli
) -> None:
    """Loading a large model takes a minute; this takes none, not even a bundle."""
    tls = ("--tls-cert", certificates["server.pem"], "--tls-key", certificates["client.key"])
    done = run_cli("serve", tmp_path, *tls, "--grpc-port", "0", "--http-port", "0", check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        f"{certificates['client.key']} does not belong to the certificate "
        f"{certificates['server.pem']}"
    )


@in_loop
async def test_grpc_over_tls_serves_who_trusts_it(certificates: Certificates) -> None:
    """Both clients check the certificate, and a client without TLS gets nothing."""
    trusting: Any = {"retry": NO_RETRY, "tls_ca": certificates["ca.pem"]}
    async with serving(MockService(), secured(certificates)) as address:
        async with AsyncClient(address, **trusting) as client:
            assert await client.generate(PROMPT, max_tokens=2)
        with Client(address, **trusting) as other:
            assert await asyncio.to_thread(other.generate, PROMPT, max_tokens=2)
        for access in ({}, {"tls": True}, {"tls_ca": certificates["stranger.pem"]}):
            async with AsyncClient(address, retry=NO_RETRY, **access) as client:
                with pytest.raises(EngineError, match="cannot be reached"):
                    await client.stats(timeout_s=5)


@in_loop
async def test_grpc_with_mutual_tls_asks_for_a_certificate_of_its_authority(
    certificates: Certificates,
) -> None:
    """Who has none, or one of somebody else's, is not let in."""
    trusting: Any = {"retry": NO_RETRY, "tls_ca": certificates["ca.pem"]}

    def shown(name: str) -> Any:
        files = {"client_cert": f"{name}.pem", "client_key": f"{name}.key"}
        return trusting | {option: certificates[file] for option, file in files.items()}

    async with serving(MockService(), secured(certificates, mutual=True)) as address:
        async with AsyncClient(address, **shown("client")) as client:
            assert await client.generate(PROMPT, max_tokens=2)
        for access in (trusting, shown("stranger")):
            async with AsyncClient(address, **access) as client:
                with pytest.raises(EngineError, match="cannot be reached"):
                    await client.stats(timeout_s=5)


def _get(port: int, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
    try:
        connection.request("GET", "/health/live")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("mutual", [False, True])
def test_https_serves_who_trusts_it_and_shows_what_is_asked_for(
    certificates: Certificates, mutual: bool
) -> None:
    """The same files hold for both servers."""
    context = ssl.create_default_context(cafile=certificates["ca.pem"])
    service = ScriptedService(lambda request: ())
    with live(service, security=secured(certificates, mutual)) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            _get(server.port, ssl.create_default_context())
        with server.raw(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n") as plain:
            assert b"HTTP" not in plain.recv(100)
        if mutual:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                _get(server.port, context)
            stranger = ssl.create_default_context(cafile=certificates["ca.pem"])
            stranger.load_cert_chain(certificates["stranger.pem"], certificates["stranger.key"])
            with pytest.raises((ssl.SSLError, ConnectionError)):
                _get(server.port, stranger)
            context.load_cert_chain(certificates["client.pem"], certificates["client.key"])
        assert _get(server.port, context) == 200


@in_loop
async def test_renewed_certificate_holds_for_new_connections(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Certificates live for weeks, servers for months; a bad one must not replace a good one."""
    files = [tmp_path / "cert.pem", tmp_path / "key.pem"]

    def put(name: str) -> None:
        for file, ending in zip(files, ("pem", "key"), strict=True):
            file.write_bytes(Path(certificates[f"{name}.{ending}"]).read_bytes())

    def subject(address: str) -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", int(address.rpartition(":")[2]))).encode()

    put("server")
    security = open_security(ServeConfig(tls_cert=str(files[0]), tls_key=str(files[1])))
    tls = security.tls
    assert tls is not None
    old, new = (Path(certificates[f"{name}.pem"]).read_bytes() for name in ("server", "client"))
    with live(ScriptedService(lambda request: ()), security=security) as http_server:
        async with serving(MockService(), security) as address:
            addresses = (address, f"127.0.0.1:{http_server.port}")

            async def shown() -> list[bytes]:
                return [await asyncio.to_thread(subject, one) for one in addresses]

            assert await shown() == [old, old]
            for bad, said in (("expired", "has expired"), ("absent", "cannot be read")):
                if bad == "expired":
                    put("expired")
                else:
                    files[0].unlink()
                with pytest.raises(UsageError, match=said):
                    tls.reload()
                assert await shown() == [old, old]
            put("client")
            tls.reload()
            assert await shown() == [new, new]
