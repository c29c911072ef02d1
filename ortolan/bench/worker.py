"""A child process that measures with its own thread pool, and the handle of it.

Requests and answers are pickled tuples over a pipe. The child ignores Ctrl-C, which its parent
answers by ending it; where the parent is gone, the pipe closes and the child leaves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ortolan.errors import BenchError, OrtolanError, UsageError

Service = Callable[..., Any]  # service(method, *args): what the child answers


class Worker:
    """Starts a child that runs `make(*args)`, then answers `call` by the methods of what it made.

    make: a function or class of a module, since the child imports it anew. Raises BenchError with
    the child's own sentence.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        try:
            self._process.start()
            theirs.close()
            self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """The result of that method in the child."""
        self._pipe.send((method, args))
        return self._answer()

    def close(self) -> None:
        """End the child, whatever it is doing. May be called again."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        if self._process.pid is not None:
            self._process.terminate()
            self._process.join(timeout=5)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            raise BenchError(
                "a measuring process ended without an answer (exit status "
                f"{self._process.exitcode}; a negative one is a signal, -9 often out of memory); "
                "try smaller --batch or --context"
            ) from None
        if kind == "usage":
            raise UsageError(value)
        if kind == "error":
            raise BenchError(value)
        return value


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    service: Any = None
    method, values = "", args
    while True:
        try:
            if service is None:
                service, result = make(*values), None
            else:
                result = getattr(service, method)(*values)
            answer: tuple[str, Any] = ("ok", result)
        except UsageError as error:
            answer = ("usage", str(error))
        except OrtolanError as error:
            answer = ("error", str(error))
        except Exception as error:  # noqa: BLE001  (the parent reports it as its own)
            answer = ("error", f"measuring failed: {type(error).__name__}: {error}")
        try:
            pipe.send(answer)
            if service is None:
                return
            method, values = pipe.recv()
        except (EOFError, OSError):
            return
