"""Requests made from the server's own OpenAPI document, by schemathesis; and damaged ones."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from http_live import http_request
from random_messages import mutated
from serve_process import Served

pytestmark = pytest.mark.slow

VERSION = "4.32.5"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
# A request that asks for a timeout gets one: that is no fault of the server's.
CONFIG = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]\n'
SEED = 7


@pytest.fixture(scope="session")
def schemathesis(root: Path) -> Path:
    """The program, in an environment of its own: it brings some thirty packages."""
    folder = root / "build" / f"schemathesis-{VERSION}"
    program = folder / "bin" / "schemathesis"
    if not program.exists():
        pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
        made = subprocess.run([sys.executable, "-m", "venv", folder], check=False)
        if made.returncode or subprocess.run([*pip, f"schemathesis=={VERSION}"]).returncode:
            pytest.skip(f"schemathesis {VERSION} cannot be installed here")
    return program


def document(url: str) -> dict[str, Any]:
    """The server's, where the model's name is the served one, so that requests get inside."""
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        name = json.load(answer)["data"][0]["id"]
    for methods in found["paths"].values():
        if body := methods.get("post", {}).get("requestBody"):
            schema = body["content"]["application/json"]["schema"]
            schema["properties"]["model"]["enum"] = [name]
    return found


def test_no_request_is_an_internal_error(
    schemathesis: Path, fuzzed: Served, fuzz_seconds: float, tmp_path: Path
) -> None:
    """What the document allows, and what it does not, is answered as it says; the server is exact
    afterwards, which `fuzzed` checks.
    """
    url = f"http://{fuzzed.http}"
    (tmp_path / "openapi.json").write_text(json.dumps(document(url)))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [
        *(schemathesis, "--config-file", "schemathesis.toml", "--no-color"),
        *("run", "openapi.json", "--url", url, "--checks", ",".join(CHECKS)),
        *("--phases", "coverage,fuzzing", "--seed", str(SEED), "--request-timeout", "30"),
        *("--max-time", str(int(max(fuzz_seconds, 1))), "--suppress-health-check", "all"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_no_bytes_are_an_internal_error(fuzzed: Served, fuzz_seconds: float) -> None:
    """Below what a client's library can send: requests with bytes changed, lost or doubled."""
    body = {"prompt": "the fox", "max_tokens": 3}
    whole = http_request("/v1/completions", body, "Connection: close\r\n")
    host, _, port = fuzzed.http.rpartition(":")
    until, rng, heads = time.monotonic() + fuzz_seconds / 6, random.Random(SEED), set()
    while time.monotonic() < until:
        sent = mutated(rng, whole) if rng.random() < 0.9 else rng.randbytes(rng.randint(1, 900))
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.settimeout(0.25)  # a request that seems to go on gets no answer yet
            try:
                connection.sendall(sent)
                head = connection.recv(12)
            except OSError:
                continue
        heads.add(head)
        assert not head.startswith(b"HTTP/1.1 5"), sent
    assert {b"HTTP/1.1 200", b"HTTP/1.1 400"} <= heads
