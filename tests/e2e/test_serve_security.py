"""`ortolan serve` with certificate and keys, and the commands that talk to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("starlette")

from certificates import Certificates
from serve_process import Served, wait_until

RunCli = Callable[..., subprocess.CompletedProcess[str]]

KEY, OTHER = "alice-key-of-many-signs", "bob-key-of-as-many-signs"


class Secured(Served):
    """A server on the tiny bundle with a file of keys, and what its clients' environment holds."""

    def __init__(self, bundle: Path, folder: Path, certificates: Certificates) -> None:
        self.keys = folder / "keys.toml"
        self.keys.write_text(f'[alice]\nkey = "{KEY}"\n')
        pair = ("--tls-cert", certificates["server.pem"], "--tls-key", certificates["server.key"])
        super().__init__(bundle, folder, *pair, "--api-keys-file", self.keys)
        self.client_env = {"ORTOLAN_TLS_CA": certificates["ca.pem"], "ORTOLAN_API_KEY": KEY}


@pytest.fixture(scope="module")
def secured(
    tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Secured]:
    with Secured(tiny_bundle, tmp_path_factory.mktemp("secured"), certificates) as server:
        yield server


def test_client_takes_key_and_authority_from_its_environment(
    secured: Secured, run_cli: RunCli
) -> None:
    """In an argument, every user of the machine could read the key."""
    ask = ("client", "generate", "the fox", "--max-tokens", "5", "--address", secured.grpc)
    assert run_cli(*ask, env=secured.client_env).stdout
    without = run_cli(*ask, env={**secured.client_env, "ORTOLAN_API_KEY": None}, check=False)
    assert without.returncode == 1
    assert len(without.stderr.splitlines()) == 1
    assert "wants a key" in without.stderr
    given = ("--api-key", KEY, "--tls-ca", secured.client_env["ORTOLAN_TLS_CA"])
    assert run_cli("client", "stats", "--address", secured.grpc, *given).stdout


@pytest.mark.parametrize("scheme", ["grpcs", "https"])
def test_bench_measures_a_secured_server(secured: Secured, run_cli: RunCli, scheme: str) -> None:
    """What is deployed is what should be measured."""
    address = f"{scheme}://{secured.grpc if scheme == 'grpcs' else secured.http}"
    load = ("--requests", "2", "--clients", "2", "--output-tokens", "2", "--repeat", "1")
    words = ("--prompt-words", "2", "--output", "json")
    measure = ("bench", "--serve", address, *load, *words)
    (row,) = json.loads(run_cli(*measure, env=secured.client_env).stdout)["results"]
    assert (row["requests"], row["completed"]) == (2, 2)
    stranger = run_cli(*measure, env={**secured.client_env, "ORTOLAN_API_KEY": "none"}, check=False)
    assert stranger.returncode == 1
    assert "not known here" in stranger.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_hangup_exchanges_keys_while_the_server_runs(secured: Secured, run_cli: RunCli) -> None:
    """A key that leaked is withdrawn without a restart."""
    before = secured.keys.read_text()
    ask = ("client", "models", "--address", secured.grpc)
    secured.keys.write_text(before.replace(KEY, OTHER))
    secured.process.send_signal(signal.SIGHUP)
    reread = "SIGHUP: the file of keys was read again"
    wait_until(lambda: reread in secured.said, reread)
    assert "not known here" in run_cli(*ask, env=secured.client_env, check=False).stderr
    assert run_cli(*ask, env={**secured.client_env, "ORTOLAN_API_KEY": OTHER}).stdout
    secured.keys.write_text(before)
    secured.process.send_signal(signal.SIGHUP)
    while run_cli(*ask, env=secured.client_env, check=False).returncode:
        assert secured.process.poll() is None


def test_server_says_its_addresses_and_no_key(secured: Secured) -> None:
    """Scripts read the lines, and everybody the log."""
    said = secured.said
    assert f"HTTP: https://{secured.http}\n" in said
    assert f"gRPC: {secured.grpc}\n" in said
    assert KEY not in said
    assert OTHER not in said


def test_server_on_a_network_without_tls_says_so(run_cli: RunCli, tmp_path: Path) -> None:
    """The keys would be anybody's who listens. Ends at a bundle that is none."""
    (tmp_path / "keys.toml").write_text(f'[alice]\nkey = "{KEY}"\n')
    listening = ("--host", "0.0.0.0", "--grpc-port", "0", "--http-port", "0")
    keys = ("--api-keys-file", tmp_path / "keys.toml")
    done = run_cli("serve", tmp_path, *listening, *keys, check=False)
    assert "cross the network unencrypted" in done.stderr
    (tmp_path / "keys.toml").write_text("[alice]\n")
    refused = run_cli("serve", tmp_path, *keys, check=False)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("alice must have either key or sha256")
