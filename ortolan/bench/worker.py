"""A child process that measures with its own thread pool, and the handle of it.

Requests and answers are pickled over the child's standard input and output. Not multiprocessing's
processes: these import the parent's main module again, which may be a script that does not expect
it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ortolan.errors import BenchError, OrtolanError, UsageError

_END_S = 5.0


class Worker:
    """Starts a child that runs `make(*args)`, then answers `call` by the methods of what it made.

    make: a function or class that the child can import. python: another interpreter than this
    one, which finds modules where it always does. Raises BenchError with the child's own sentence.
    Ctrl-C does not reach the child: whoever holds the handle closes it. Where the holder is gone,
    the child's input ends, and it leaves.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, python: Path | None = None) -> None:
        # Not resolved: an environment's Python is a link, and knows itself by its own name.
        program = str(python.absolute()) if python else sys.executable
        self._process = subprocess.Popen(
            [program, "-P", "-m", "ortolan.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **_apart(),
        )
        try:
            self._send(None if python else sys.path)
            self._send((make, args))
            self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """The result of that method in the child."""
        self._send((method, args))
        return self._answer()

    def close(self) -> None:
        """End the child, whatever it is doing. May be called again."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will be missing, too
            pickle.dump(value, self._process.stdin)
            self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            kind, value = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            status = self._process.wait(_END_S)
            raise BenchError(
                f"a measuring process ended without an answer (exit status {status}; a negative "
                "one is a signal, and -9 often means out of memory); try a smaller --batch or "
                "--context"
            ) from None
        if kind == "usage":
            raise UsageError(value)
        if kind == "error":
            raise BenchError(value)
        return value


def _apart() -> dict[str, Any]:
    """Arguments of Popen that keep a terminal's Ctrl-C from the child."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


def _serve() -> None:
    """The child: answers until its input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with answers
    with os.fdopen(0, "rb") as requests, answers:
        if (path := pickle.load(requests)) is not None:
            sys.path[:] = path
        service: Any = None
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                what, args = pickle.load(requests)
                kind, value = _result(what if service is None else getattr(service, what), args)
                if service is None and kind == "ok":
                    service, value = value, None
                pickle.dump((kind, value), answers)
                answers.flush()


def _result(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "ok", function(*args)
    except UsageError as error:
        return "usage", str(error)
    except OrtolanError as error:
        return "error", str(error)
    except Exception as error:  # noqa: BLE001  (the parent reports it as its own)
        return "error", f"measuring failed: {type(error).__name__}: {error}"


if __name__ == "__main__":
    _serve()
