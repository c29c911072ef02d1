"""What this process may use of the machine's processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortolan.runtime.machine import cpu_shares, usable_cores


def test_usable_cores_respect_the_containers_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """More threads than the quota allows wait for each other at every operator."""
    folder = tmp_path_factory.mktemp("cgroup")
    monkeypatch.setattr("ortolan.runtime.machine._CGROUP", folder)
    monkeypatch.setattr("ortolan.runtime.machine._CPUS", folder)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == 8
    (folder / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == 8
    (folder / "cpu.max").write_text("250000 100000\n")
    assert usable_cores() == 3
    (folder / "cpu.max").write_text("1000 100000\n")
    assert usable_cores() == 1


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of four cores of two hyperthreads each, numbered as Linux does."""
    monkeypatch.setattr("ortolan.runtime.machine._CGROUP", tmp_path)
    monkeypatch.setattr("ortolan.runtime.machine._CPUS", tmp_path)
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("four_cores")
def test_hyperthreads_of_a_core_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread on each of them would share one core's vector units, and wait at every operator."""
    assert usable_cores() == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 4, 5}, raising=False)
    assert usable_cores() == 2


@pytest.mark.usefixtures("four_cores")
def test_processors_are_shared_out_by_neighbours_and_whole_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine's threads have their caches to themselves, and both threads of each core."""
    monkeypatch.setattr("os.sched_setaffinity", pytest.fail, raising=False)
    assert cpu_shares(2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert cpu_shares(3) == [{0, 4}, {1, 5}, {2, 6, 3, 7}]
    assert cpu_shares(5) is None
    monkeypatch.delattr("os.sched_setaffinity")
    assert cpu_shares(2) is None
