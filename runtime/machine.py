"""What this process may use of the machine's processors: the container's share, not the host's."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Cores this process may run on, at most the cgroup's CPU quota; at least 1.

    Hyperthreads of one core count once: they share the units that matrix products keep busy.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cores = os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def cpu_shares(count: int) -> list[frozenset[int]] | None:
    """The processors this process may run on in `count` parts, neighbours together.

    Hyperthreads of one core stay together, and neighbours by number share caches and memory as a
    rule. None where there are fewer cores than parts, or where threads cannot be kept anywhere.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores: dict[str, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_core_of(cpu), set()).add(cpu)
    if len(cores) < count:
        return None
    found = list(cores.values())
    bounds = [len(found) * part // count for part in range(count + 1)]
    return [frozenset().union(*found[begin:end]) for begin, end in itertools.pairwise(bounds)]


def stay_on(cpus: frozenset[int] | None) -> None:
    """Keep this thread, and those that it starts from now on, on these processors."""
    if cpus is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # one of them was taken away meanwhile
            os.sched_setaffinity(0, cpus)


def _core_of(cpu: int) -> str:
    """A name of the core that a processor is part of: its siblings' list, or its own number."""
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return f"cpu{cpu}"


def _cpu_quota() -> float | None:
    """The cgroup's limit in cores (version 2, then 1), or None without one."""
    try:
        limit, period = (_CGROUP / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = (_CGROUP / "cpu/cpu.cfs_quota_us").read_text()
        period = (_CGROUP / "cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def adds_bytes_in_16_bits() -> bool:
    """Whether products of bytes are added up in 16 bits, where they may overflow: x86 without VNNI.

    True where an x86 processor does not say what it has.
    """
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return False
    return not {"avx512_vnni", "avx_vnni"} & set(_cpuinfo().split())


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_fingerprint() -> str:
    """A short hash of the processor's model and instruction sets.

    Packed weights are laid out for these, so a cache made elsewhere must not be found.
    """
    parts = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    parts += sorted({line for line in lines if line.startswith(wanted)})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
