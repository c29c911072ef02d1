"""Benchmarks of servers: whatever they start ends with them, and the right side is judged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from _common import Report
from _servers import started
from serve_vs_llama_server import BALANCED, NOT_JUDGED, SAME_FILE, Bounds, bounds_of, judge

from ortolan.errors import BenchError

WAITS = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(60)"


def test_server_ends_with_the_benchmark_whatever_happens(tmp_path: Path) -> None:
    """A server left behind takes its cores from every later measurement."""
    ready, processes = tmp_path / "ready", []

    def fails() -> None:
        with started([sys.executable, "-c", WAITS, str(ready)], ready.exists) as process:
            processes.append(process)
            assert process.poll() is None
            raise RuntimeError("the comparison failed")

    with pytest.raises(RuntimeError, match="the comparison failed"):
        fails()
    assert processes[0].returncode is not None


def test_server_that_does_not_start_is_said_with_its_last_words() -> None:
    """Waiting for it would take minutes, and say nothing."""
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(BenchError, match="did not become ready: no such model"),
        started(command, lambda: False),
    ):
        pass


def row(rates: list[float], lost: int, ratio: Any) -> dict[str, Any]:
    kinds = {"status 503": {"count": lost, "first": "busy"}} if lost else {}
    return {
        "tokens_per_s": {"samples": rates},
        "ttft_ms": {"p50": 1.0},
        "lost": kinds,
        "resent": 0,
        "requests": 10,
        "completed": 10 - lost,
        "ratio": ratio,
    }


@pytest.mark.parametrize(
    ("speed", "bounds", "wait", "lost", "passed"),
    [
        (1.9, SAME_FILE, 2.1, 0, [True, True, True]),
        (1.7, SAME_FILE, 2.1, 0, [False, True, True]),
        (1.7, BALANCED, 2.1, 0, [True, True, True]),
        (1.4, BALANCED, 2.1, 0, [False, True, True]),
        (1.9, SAME_FILE, 1.9, 0, [True, False, True]),
        (1.9, SAME_FILE, 2.1, 1, [True, True, False]),
        (0.5, NOT_JUDGED, 0.5, 1, [None, None, False]),
    ],
)
def test_each_bound_is_judged(
    speed: float, bounds: Bounds, wait: float, lost: int, passed: list[bool | None]
) -> None:
    """The report's ratios are above one where we are better; the bound on the wait is below."""
    ratio = {"tokens_per_s": {"median": speed}, "ttft": {"median": wait}}
    report = Report("claim")
    judge(report, [row([2.0], lost, None), row([1.0], 0, ratio)], bounds)
    assert [check.passed for check in report.checks] == [*passed, None]


def test_bounds_are_for_what_they_were_set_for() -> None:
    """Another file's figures would be called met or missed by another one's measure."""
    assert bounds_of(None, "balanced") is SAME_FILE
    assert bounds_of("Q4_0", "balanced") is BALANCED
    assert bounds_of("Q8_0", "balanced") is bounds_of("Q4_0", "") is NOT_JUDGED
