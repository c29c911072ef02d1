"""How long two cores take to pass a byte to and fro.

A virtual machine's cores may be moved while it runs: close together, or to parts of a processor
that share no cache. What two threads hand each other then takes several times as long, and nothing
else shows it. Python's own loop is most of what is measured where they are close.
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time

_TURNS = 5000
_START_S = 10.0
_MOST_SPINS = 5_000_000  # some tenths of a second


def round_trip_ns() -> float | None:
    """The median, in nanoseconds; None with fewer than two cores, or where none can be chosen."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        return None
    here, there = sorted(own)[:2]
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(1))
        file.flush()
        command = [sys.executable, __file__, file.name, str(there)]
        with subprocess.Popen(command) as other, mmap.mmap(file.fileno(), 1) as shared:
            os.sched_setaffinity(0, {here})
            try:
                return _served(shared, other)
            finally:
                os.sched_setaffinity(0, own)
                other.kill()


def _served(shared: mmap.mmap, other: subprocess.Popen[bytes]) -> float | None:
    """Odd numbers go there, the next even ones come back; 255 says that the other is ready."""
    until_s = time.monotonic() + _START_S
    while shared[0] != 255:
        if other.poll() is not None or time.monotonic() > until_s:
            return None
    found = []
    for turn in range(_TURNS):
        sent = 2 * (turn % 100) + 1
        began_ns = time.perf_counter_ns()
        shared[0] = sent
        spins = 0
        while shared[0] == sent:
            spins += 1
            if spins > _MOST_SPINS:  # somebody else has the other core, or it has ended
                return None
        found.append(time.perf_counter_ns() - began_ns)
    return statistics.median(found)


def _return(name: str, core: int) -> None:
    os.sched_setaffinity(0, {core})
    with open(name, "r+b") as file, mmap.mmap(file.fileno(), 1) as shared:  # noqa: PTH123
        shared[0] = 255
        until_s = time.monotonic() + _START_S
        for turn in range(_TURNS):
            expected = 2 * (turn % 100) + 1
            while shared[0] != expected:
                if turn == 0 and time.monotonic() > until_s:
                    return
            shared[0] = expected + 1


if __name__ == "__main__":
    _return(sys.argv[1], int(sys.argv[2]))
