"""The one thread pool that every session of a process shares.

Two sessions with spinning pools of their own nearly halve each other's speed, so sessions use
ONNX Runtime's global pool. Its size can be set once per process, before the first session.
"""

from __future__ import annotations

import threading

import onnxruntime as ort

from ortolan.errors import EngineError, UsageError
from ortolan.runtime.machine import usable_cores

_lock = threading.Lock()
_size: int | None = None


def use_threads(threads: int | None) -> int:
    """Set the pool's size, or check that it is the same as before; returns it.

    None takes what the process has already, else the usable cores. Raises EngineError for a second
    size in one process and UsageError for one below 1.
    """
    global _size
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads}; it must be 1 or more")
    with _lock:
        if _size is None:
            wanted = threads or usable_cores()
            # Graphs run node after node, so the pool between nodes has nothing to do.
            try:
                ort.set_global_thread_pool_sizes(wanted, 1)
            except Exception as exc:  # ONNX Runtime's own classes derive from Exception
                raise EngineError(
                    "this process has set up ONNX Runtime's global thread pool itself, which can "
                    "be done once; load Ortolan first, or in a process of its own"
                ) from exc
            _size = wanted
        elif threads is not None and threads != _size:
            raise EngineError(
                f"this process computes with {_size} threads already and cannot change to "
                f"{threads}; start another process for another number"
            )
        return _size
