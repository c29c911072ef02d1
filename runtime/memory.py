"""Memory that this process has and may still take: the container's limits, not the host's."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_UNKNOWN = 2**30  # a system that says nothing has at least that
_UNKNOWN_PROCESS = 100 * 2**20  # Python with numpy, ONNX Runtime and a tokenizer


@dataclass(frozen=True)
class Memory:
    """Bytes that this process may hold in all, and who says so.

    given: a caller. container: a limit on this process's group, which it shares with few.
    machine: what the system has free, which others want too.
    """

    bytes: int
    source: Literal["given", "container", "machine"]


def memory_found() -> Memory:
    """What is free, together with what this process holds already."""
    own = _resident("RssAnon") or 0
    system, container = _system_free(), _container_free()
    if container is not None and (system is None or container < system):
        return Memory(container + own, "container")
    return Memory((_UNKNOWN if system is None else system) + own, "machine")


def process_bytes() -> int:
    """Bytes that this process holds: its own, and those of libraries that it has mapped."""
    anonymous, mapped = _resident("RssAnon"), _resident("RssFile")
    if anonymous is None or mapped is None:
        return _UNKNOWN_PROCESS
    return anonymous + mapped


def return_freed_memory() -> None:
    """Give back to the system what was freed: the C library keeps it, in case of more to come.

    After weights were packed that is as much as they take. Takes milliseconds; does nothing where
    the library has no such call.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # musl has none
            ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int | None:
    """A size in /proc/self/status, or None where there is no such thing."""
    try:
        lines = (_PROC / "self/status").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _system_free() -> int | None:
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kilobytes) * 1024
    except (OSError, ValueError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):
        return None


def _container_free() -> int | None:
    """The least that this process's control groups leave (version 2, else 1); None without any."""
    for found in (
        [_group_free(folder, *_VERSION_2) for folder in _groups("", _CGROUP)],
        [_group_free(folder, *_VERSION_1) for folder in _groups("memory", _CGROUP / "memory")],
    ):
        if known := [size for size in found if size is not None]:
            return min(known)
    return None


# Files with a group's limit and use, and what memory.stat calls the pages of files in them.
_VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's group and of those around it, as far as they can be seen."""
    yield root
    with suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text(encoding="utf-8").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controller not in controllers.split(","):
                continue
            folder = root
            for part in Path(path).parts[1:]:
                folder /= part
                yield folder


def _group_free(folder: Path, limit: str, used: str, cached: tuple[str, str]) -> int | None:
    """A group's limit minus what cannot be given back; None without a limit.

    Pages of files can be: they are on disk. Those of our weights are among them, from an earlier
    run, and are counted where the memory is planned.
    """
    try:
        most = int((folder / limit).read_text())  # "max" is no number
        taken = int((folder / used).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        reclaimable = sum(int(line.split()[1]) for line in lines if line.split()[0] in cached)
    except (OSError, ValueError, IndexError):
        return None
    return max(most - taken + reclaimable, 0)
