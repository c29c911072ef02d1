"""`ortolan serve` in a process of its own, on free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

START_S = 120.0
ORTOLAN = ("-P", "-m", "ortolan")
FREE_PORTS = ("--grpc-port", "0", "--http-port", "0")


class Served:
    """A server that is ready. Use it as a context manager: it is killed at the end.

    folder: for its ports and its output. program: what Python runs before `serve`. ports: options.
    wait: until it is ready; otherwise `wait_ready` is still to be called. more: of
    subprocess.Popen.
    """

    def __init__(
        self,
        bundle: Path,
        folder: Path,
        *options: str | Path,
        program: Sequence[str | Path] = ORTOLAN,
        ports: Sequence[str] = FREE_PORTS,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
        **more: Any,
    ) -> None:
        self.port_file, self._said = folder / "ports.json", folder / "said.txt"
        command = [*program, "serve", bundle, *ports, "--port-file", self.port_file, *options]
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env={**os.environ, **(env or {})},
                stdout=said,
                stderr=subprocess.STDOUT,
                **more,
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"the server does not start: {self.said}")
            time.sleep(0.02)
        self.addresses: dict[str, Any] = json.loads(self.port_file.read_text())

    @property
    def grpc(self) -> str:
        """Its address, host:port."""
        return str(self.addresses["grpc"])

    @property
    def http(self) -> str:
        """The same."""
        return str(self.addresses["http"])

    @property
    def said(self) -> str:
        """All that it wrote."""
        return self._said.read_text()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Its exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = 30.0) -> None:
    """Fails the test if it does not become true in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)
