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


class Served:
    """A server that is ready. Use it as a context manager: it is killed at the end.

    folder: for its ports and its output. program: what Python runs before `serve`. more: of
    subprocess.Popen.
    """

    def __init__(
        self,
        bundle: Path,
        folder: Path,
        *options: str,
        program: Sequence[str | Path] = ORTOLAN,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.begin(bundle, folder, *options, program=program, env=env, **more)
        self.wait_ready()

    @classmethod
    def begun(cls, bundle: Path, folder: Path, *options: str, **more: Any) -> Served:
        """One that may not be ready yet; see `wait_ready`."""
        made = cls.__new__(cls)
        made.begin(bundle, folder, *options, **more)
        return made

    def begin(
        self,
        bundle: Path,
        folder: Path,
        *options: str,
        program: Sequence[str | Path] = ORTOLAN,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.port_file, self._said = folder / "ports.json", folder / "said.txt"
        ports = ("--grpc-port", "0", "--http-port", "0", "--port-file", self.port_file)
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", bundle, *ports, *options],
                cwd=folder,
                env={**os.environ, **(env or {})},
                stdout=said,
                stderr=subprocess.STDOUT,
                **more,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"the server does not start: {self.said}")
            time.sleep(0.02)
        addresses = json.loads(self.port_file.read_text())
        self.grpc, self.http = str(addresses["grpc"]), str(addresses["http"])

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
