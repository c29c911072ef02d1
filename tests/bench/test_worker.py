"""Measuring processes: their answers, their errors, their end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_child import Service

from ortolan.bench.worker import Worker
from ortolan.errors import BenchError, UsageError


def test_service_lives_between_calls() -> None:
    """A model is loaded once, not once for every sample."""
    worker = Worker(Service, 1)
    assert worker.call("add", 2) == 3
    assert worker.call("add", 4) == 7
    worker.close()


def test_error_of_the_child_is_one_sentence_here() -> None:
    """Its traceback belongs to another process; the reader wants to know what to do."""
    with pytest.raises(BenchError, match=r"pip install '\.\[bench\]'"):
        Worker(Service, -1)
    worker = Worker(Service, 1)
    with pytest.raises(UsageError, match="wrong option"):
        worker.call("fail", "usage")
    with pytest.raises(BenchError, match="RuntimeError: a bug"):
        worker.call("fail", "bug")
    assert worker.call("add", 0) == 1  # it goes on
    worker.close()


def test_killed_child_is_noticed() -> None:
    """The system kills who takes too much memory: waiting for its answer would last for ever."""
    worker = Worker(Service, 1)
    with pytest.raises(BenchError, match="exit status -9"):
        worker.call("die")
    worker.close()


def test_closing_ends_the_process_and_may_be_repeated() -> None:
    """A process that is left behind keeps its memory and spoils the next measurement."""
    worker = Worker(Service, 1)
    pid = worker.call("pid")
    worker.close()
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_child_leaves_when_its_parent_is_gone() -> None:
    """A killed parent closes nothing; its children must not keep the machine busy."""
    script = (
        "import os, signal\n"
        "from bench_child import Service\n"
        "from ortolan.bench.worker import Worker\n"
        "print(Worker(Service, 1).call('pid'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.1)
    pytest.fail("the child outlived its parent")


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has waited for does not."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self").exists():
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
