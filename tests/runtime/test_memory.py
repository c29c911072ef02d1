"""What memory there is: limits of containers, wherever they are set, before the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortolan.runtime import memory
from ortolan.runtime.memory import Memory, memory_found, process_bytes, return_freed_memory

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 GiB free, a process that holds 1 MiB, and no limits yet."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {16 * 2**20} kB\n")
    status = "Name: python\nRssAnon:\t 1024 kB\nRssFile:\t 2048 kB\n"
    (tmp_path / "proc/self/status").write_text(status)
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/ortolan.service\n")
    return tmp_path


def limit(folder: Path, most: int | str, used: int, files: int = 0) -> None:
    """A control group of version 2 with that limit, of which `files` are pages of files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon 5\ninactive_file {files // 2}\nactive_file {files // 2}\n"
    (folder / "memory.stat").write_text(stat)


def test_machine_without_limits_gives_what_it_has_free(system: Path) -> None:
    """What the process holds already is its own to plan with."""
    assert memory_found() == Memory(16 * GIB + 2**20, "machine")
    assert process_bytes() == 3 * 2**20


def test_limit_of_the_container_counts(system: Path) -> None:
    """Planned by the machine's memory, a server in a container is killed when it is busy."""
    limit(system / "cgroup", 4 * GIB, used=GIB)
    assert memory_found() == Memory(3 * GIB + 2**20, "container")


def test_pages_of_files_can_be_given_back(system: Path) -> None:
    """Weights that an earlier run left in the page cache must not halve the KV budget."""
    limit(system / "cgroup", 4 * GIB, used=3 * GIB, files=2 * GIB)
    assert memory_found().bytes == 3 * GIB + 2**20


def test_limit_of_a_service_counts(system: Path) -> None:
    """systemd sets MemoryMax on the unit's group, which is not the root of what is seen."""
    limit(system / "cgroup", "max", used=GIB)
    limit(system / "cgroup/system.slice", 8 * GIB, used=GIB)
    limit(system / "cgroup/system.slice/ortolan.service", 2 * GIB, used=0)
    assert memory_found() == Memory(2 * GIB + 2**20, "container")
    limit(system / "cgroup/system.slice", 8 * GIB, used=7 * GIB)
    assert memory_found().bytes == GIB + 2**20


def test_limit_above_what_is_free_says_nothing(system: Path) -> None:
    """Version 1 without a limit states a number near 2^63."""
    folder = system / "cgroup/memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder / "memory.usage_in_bytes").write_text("1000\n")
    (folder / "memory.stat").write_text("total_inactive_file 0\n")
    assert memory_found().source == "machine"
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB + 1000}\n")
    assert memory_found() == Memory(2 * GIB + 2**20, "container")


def test_system_that_says_nothing_still_gives_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without /proc must load models, too."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    assert memory_found().bytes > 0
    assert process_bytes() > 0
    return_freed_memory()
