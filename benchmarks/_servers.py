"""Servers for a benchmark: started, waited for, and ended by their own process."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _common import ortolan_command

from ortolan.bench.peers.llama_cpp import find_program, library_environment
from ortolan.errors import BenchError

LLAMA_SERVER = "llama-server"
_POLL_S = 0.2
_START_S = 300.0  # a first start packs the weights
_END_S = 60.0


@dataclass(frozen=True)
class Ours:
    """Addresses of a running `ortolan serve`."""

    grpc: str
    http: str


@contextmanager
def started(
    command: Sequence[str],
    is_ready: Callable[[], bool],
    env: Mapping[str, str] | None = None,
    start_s: float = _START_S,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the context ends, entered when it is ready.

    Raises BenchError with its last line if it ends before, or is not ready in time.
    """
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            command,
            # In another folder than the repository's root; see ortolan_command.
            cwd=Path(__file__).parent,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            until_s = time.monotonic() + start_s
            while not is_ready():
                if process.poll() is not None or time.monotonic() > until_s:
                    said.seek(0)
                    lines = said.read().decode("utf-8", "replace").strip().splitlines()
                    last = lines[-1] if lines else "it said nothing"
                    raise BenchError(f"{Path(command[0]).name} did not become ready: {last}")
                time.sleep(_POLL_S)
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


@contextmanager
def ortolan_server(bundle: Path, threads: int, *flags: object) -> Iterator[Ours]:
    """`ortolan serve` with more flags on free ports of the loopback."""
    with tempfile.TemporaryDirectory(prefix="ortolan-ports-") as folder:
        ports = Path(folder) / "ports.json"
        command = ortolan_command(
            # Both addresses are sent the same prompts: the second must not find the first's KV.
            *("serve", bundle.absolute(), "--threads", threads, "--prefix-cache-mb", 0),
            *("--grpc-port", 0, "--http-port", 0, "--port-file", ports, *flags),
        )
        with started(command, ports.exists):
            found = json.loads(ports.read_text(encoding="utf-8"))
            yield Ours(f"grpc://{found['grpc']}", f"http://{found['http']}")


@contextmanager
def llama_server(
    gguf: Path, threads: int, slots: int, context: int, folder: Path | None
) -> Iterator[str]:
    """llama-server with `slots` of `context` positions each; its address.

    Raises BenchError if the program is not found.
    """
    program = find_program(LLAMA_SERVER, folder)
    port = free_port()
    command = [
        *(str(program), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
        *("-np", str(slots), "-c", str(slots * context), "-t", str(threads), "--no-webui"),
    ]
    address = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory(prefix="ortolan-links-") as links,
        started(
            command,
            lambda: answers(f"{address}/health"),
            library_environment(program.parent, Path(links)),
        ),
    ):
        yield address


def free_port() -> int:
    """A port of the loopback that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def answers(url: str) -> bool:
    """Whether a GET is answered with a status of success."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
