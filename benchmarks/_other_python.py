"""A peer's tests in a process of another environment: a line in is a round, a line out is it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

from _common import Report, Series
from _ours import Ours, Tests

from ortolan.errors import BenchError


class OtherPython:
    """Rounds of the tests by a script of this folder, which waits without spinning between them.

    The script takes `given`, then the tests as JSON; its first line says its version. name: of the
    peer, in errors. Raises BenchError where it stops.
    """

    def __init__(self, name: str, python: str, script: str, given: list[str], tests: Tests) -> None:
        self.name = name
        child = Path(__file__).with_name(script)
        self._process = subprocess.Popen(
            [python, str(child), *given, json.dumps(asdict(tests))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.version = json.loads(self._line())["version"]

    def run(self) -> tuple[float, ...]:
        """Seconds of prefill, decode and many rows."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return tuple(json.loads(self._line()))

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, said = self._process.communicate()
            last = said.strip().splitlines()[-1:] or ["no message"]
            raise BenchError(f"{self.name} stopped: {last[0]}")
        return line


def run_in_turn(
    report: Report, other: OtherPython, mine: Ours, rounds: int, bound: float | None = None
) -> None:
    """Rounds of both, which take turns, and how many times as fast ours is in each test.

    Raises BenchError where the other stops.
    """
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(other.run())
        ours.append(mine.run())
    other.close()
    for test, name in enumerate(mine.tests.names()):
        report.speed(
            name,
            Series(f"ortolan {name}", "s", [run[test] for run in ours]),
            Series(f"{other.name} {name}", "s", [run[test] for run in theirs]),
            bound,
        )


def check_installed(python: str, module: str, remedy: str) -> None:
    """Raises BenchError, with the remedy, unless that Python can import the module."""
    try:
        done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
    except OSError as exc:
        raise BenchError(f"--python {python} does not run ({exc.strerror})") from None
    if done.returncode != 0:
        raise BenchError(remedy)
