"""64 clients of both protocols at once, some of whom leave, dawdle or are killed.

ORTOLAN_LOAD_SECONDS says how long; by default two minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("starlette")

from load_clients import Load, clients, long_questions_of, questions_of
from serve_process import Served, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to measure with"),
]

SECONDS = float(os.environ.get("ORTOLAN_LOAD_SECONDS", "120"))
WARM_UP = 0.4  # of these, before the first look
CONTEXT = 384
PROCESSES, EACH_IN_PROCESS, EACH_HERE = 4, 2, 24  # 64 clients
LIFE_S = (2.0, 6.0)  # of a client process, from its start, before it is killed
TESTS = Path(__file__).resolve().parent.parent
# What allocators keep, and pages of libraries that were touched late. A leak of 10 KB a request
# would be 20 MB and more in a minute.
RESIDENT_MARGIN_BYTES = 16 * 2**20
OBJECTS_MARGIN = 2_000
FDS_MARGIN = 2  # gRPC's pollers
THREADS_MARGIN = 3  # gRPC has more or fewer of them by what there is to do


@dataclass(frozen=True)
class Held:
    """What the idle server holds. told: by itself, see serve_watched.py."""

    fds: int
    threads: int
    resident_bytes: int
    told: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """How requests ended, how many client processes were killed, what was held in between."""

    ends: Counter[str]
    killed: int
    before: Held
    after: Held


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """What became of it all."""
    folder = tmp_path_factory.mktemp("load")
    bundle = _bundle(folder)
    options = (
        *("--max-slots", "16", "--max-context", str(CONTEXT), "--kv-tokens", "1600"),
        *("--prefix-cache-mb", "1"),
    )
    program = ("-P", TESTS / "serve_watched.py", folder / "held.json")
    with Served(bundle, folder, *options, program=program) as served:
        sockets = _sockets(served)
        load = Load(
            served.grpc,
            served.http,
            questions_of(bundle, 48, CONTEXT, seed=1),
            long_questions_of(bundle, 4, CONTEXT),
        )
        load.write(folder / "load.pickle")
        ends: Counter[str] = Counter()
        killed = _under_load(load, folder, SECONDS * WARM_UP, 1, ends)
        before = _held(served, folder, sockets)
        killed += _under_load(load, folder, SECONDS * (1 - WARM_UP), 2, ends)
        after = _held(served, folder, sockets)
        assert served.stop() == 0
        yield Report(ends, killed, before, after)


def _bundle(folder: Path) -> Path:
    """The tiny model with a longer context."""
    pytest.importorskip("gguf")
    from tiny_llama import Shape, write_tiny_gguf

    from ortolan.export.exporter import ExportOptions, export_bundle

    gguf = write_tiny_gguf(folder / "tiny.gguf", types="Q4_1", shape=Shape(context=CONTEXT))
    export_bundle(str(gguf), folder / "tiny", ExportOptions())
    return folder / "tiny"


def _under_load(load: Load, folder: Path, seconds: float, seed: int, ends: Counter[str]) -> int:
    """Runs all clients for so long, adds how requests ended, and says how many were killed."""
    until = time.monotonic() + seconds
    with _killed_clients(folder, seed, ends) as killing:

        async def run() -> int:
            killer = asyncio.create_task(killing(until))
            await clients(load, EACH_HERE, seed, lambda: time.monotonic() < until, ends)
            return await killer

        return asyncio.run(run())


@contextmanager
def _killed_clients(folder: Path, seed: int, ends: Counter[str]) -> Iterator[Any]:
    """Processes of clients, each killed in the midst of what it does, and replaced."""
    numbers, rng = itertools.count(seed * 1000), random.Random(seed)
    running: dict[subprocess.Popen[bytes], tuple[Path, float]] = {}

    def start() -> None:
        number = next(numbers)
        log = folder / f"client-{number}.txt"
        with log.open("wb") as said:
            arguments = [folder / "load.pickle", str(number), str(EACH_IN_PROCESS)]
            process = subprocess.Popen(
                [sys.executable, "-P", TESTS / "load_clients.py", *arguments],
                env={**os.environ, "PYTHONPATH": str(TESTS)},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        running[process] = log, time.monotonic() + rng.uniform(*LIFE_S)

    def kill(process: subprocess.Popen[bytes]) -> None:
        log, _ = running.pop(process)
        assert process.poll() is None, log.read_text()
        process.kill()
        process.wait()
        lines = log.read_text().splitlines()
        ends.update(json.loads(lines[-1]) if lines else {})

    async def killing(until: float) -> int:
        count = 0
        for _ in range(PROCESSES):
            start()
        while time.monotonic() < until:
            await asyncio.sleep(0.1)
            for process in [one for one, (_, end) in running.items() if end < time.monotonic()]:
                kill(process)
                count += 1
                start()
        return count

    try:
        yield killing
    finally:
        for process in tuple(running):
            kill(process)


def _held(served: Served, folder: Path, sockets: int) -> Held:
    """Waits until there are no more sockets than before the first client, and asks."""
    proc, told = Path(f"/proc/{served.process.pid}"), folder / "held.json"
    wait_until(lambda: _sockets(served) <= sockets, "connections that clients have left end")
    told.unlink(missing_ok=True)
    served.process.send_signal(signal.SIGUSR1)
    wait_until(told.exists, "the server says what it holds")
    return Held(
        len(list((proc / "fd").iterdir())),
        len(list((proc / "task").iterdir())),
        int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        json.loads(told.read_text()),
    )


def _sockets(served: Served) -> int:
    found = 0
    for entry in Path(f"/proc/{served.process.pid}/fd").iterdir():
        try:
            found += str(entry.readlink()).startswith("socket:")
        except OSError:  # closed since
            continue
    return found


def test_every_stream_ends_properly_and_to_the_bit(report: Report) -> None:
    """vllm#52852, vllm#23138: whatever the others do, an answer is the one computed alone."""
    assert not {end: count for end, count in report.ends.items() if end.startswith("fault")}


def test_the_load_was_what_it_says(report: Report) -> None:
    """A load that nobody notices proves nothing."""
    ends = report.ends
    total = ends.total()
    assert total > 10 * SECONDS
    assert 0.06 < ends["left"] / total < 0.14
    assert ends["slow"] / total > 0.02
    assert report.killed > SECONDS / 6
    assert report.after.told["preemptions"] > report.before.told["preemptions"] > 0
    assert report.after.told["prefix_hit_tokens"] > report.before.told["prefix_hit_tokens"] > 0


def test_nothing_of_any_request_is_left(report: Report) -> None:
    """llama.cpp#24496: slots, budget and references to cached blocks come back, of all that left
    in whatever way.
    """
    for held in (report.before, report.after):
        assert "fault" not in held.told
        left = {
            name: held.told[name]
            for name in ("slots", "waiting", "kv_tokens", "prefix_blocks", "streams")
        }
        assert not any(left.values()), left


def test_descriptors_threads_and_memory_are_flat(report: Report) -> None:
    """A server runs for months: what a minute leaves behind, a month makes large."""
    before, after = report.before, report.after
    assert after.fds <= before.fds + FDS_MARGIN
    assert after.threads <= before.threads + THREADS_MARGIN
    assert after.told["objects"] <= before.told["objects"] + OBJECTS_MARGIN
    assert after.resident_bytes <= before.resident_bytes + RESIDENT_MARGIN_BYTES
