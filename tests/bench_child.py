"""What tests of measuring processes run in the child, which has to be able to import it."""

from __future__ import annotations

import os
import signal

from ortolan.errors import MissingDependencyError, UsageError


class Service:
    """Runs in the child."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise MissingDependencyError("thing", "bench", "starting")
        self._number = start

    def add(self, number: int) -> int:
        self._number += number
        return self._number

    def pid(self) -> int:
        return os.getpid()

    def fail(self, kind: str) -> None:
        raise UsageError("wrong option") if kind == "usage" else RuntimeError("a bug")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
