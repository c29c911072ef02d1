"""How the sessions of a process share its threads: all in one pool, or each engine with its own.

Two sessions with spinning pools of their own nearly halve each other's speed, so sessions use
ONNX Runtime's global pool. Its size can be set once per process, before the first session. Where
several engines work side by side (replicas), a shared pool would have them wait for each other;
their sessions then have pools of their own, which stop spinning when a call is over.
"""

from __future__ import annotations

import threading

import onnxruntime as ort

from ortolan.errors import EngineError, UsageError
from ortolan.runtime.machine import usable_cores

_lock = threading.Lock()
_size: int | None = None
_engines = 1  # among which the threads are shared out


def use_threads(threads: int | None, engines: int | None = None) -> int:
    """Set how many threads compute, or check that it is the same as before; returns it.

    threads: None takes what the process has already, else the usable cores. engines: how many
    share them out, each with threads of its own; None: as the process does already, else 1.
    Raises EngineError for a second number of either in one process and UsageError for one below 1.
    """
    global _size, _engines
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads}; it must be 1 or more")
    with _lock:
        if _size is None:
            wanted = threads or usable_cores()
            if engines in (None, 1):
                _set_up_shared_pool(wanted)
            _size, _engines = wanted, engines or 1
        elif threads is not None and threads != _size:
            raise EngineError(
                f"this process computes with {_size} threads already and cannot change to "
                f"{threads}; start another process for another number"
            )
        elif engines is not None and engines != _engines:
            raise EngineError(
                f"this process shares its threads among {_engines} engines already and cannot "
                f"change to {engines}; start another process for another number"
            )
        return _size


def _set_up_shared_pool(threads: int) -> None:
    # Graphs run node after node, so the pool between nodes has nothing to do.
    try:
        ort.set_global_thread_pool_sizes(threads, 1)
    except Exception as exc:  # ONNX Runtime's own classes derive from Exception
        raise EngineError(
            "this process has set up ONNX Runtime's global thread pool itself, which can "
            "be done once; load Ortolan first, or in a process of its own"
        ) from exc


def choose_pool(options: ort.SessionOptions) -> None:
    """Have a session compute in the pool that is its own or everybody's."""
    if _engines == 1 or _size is None:
        options.use_per_session_threads = False
        return
    options.intra_op_num_threads = max(_size // _engines, 1)
    # Prefill's threads would go on turning beside decode's, and the other way round.
    options.add_session_config_entry("session.force_spinning_stop", "1")
