"""How fast two cores hand each other something: the figure that tells machines' states apart."""

from __future__ import annotations

import os

import _cores
import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two cores that can be chosen are needed",
)


def test_round_trip_is_measured_and_the_affinity_given_back() -> None:
    """A benchmark that went on with one core would measure that."""
    before = os.sched_getaffinity(0)
    # None: somebody else had the other core for some tenths of a second.
    assert any((_cores.round_trip_ns() or 0) > 0 for _ in range(5))
    assert os.sched_getaffinity(0) == before


def test_another_side_that_ends_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's result is there by then, and must be printed."""
    monkeypatch.setattr(_cores, "__file__", os.devnull)  # an empty program
    assert _cores.round_trip_ns() is None
