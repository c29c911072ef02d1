"""Medians, percentiles and ratios of few samples."""

from __future__ import annotations

import pytest

from ortolan.bench.stats import Spread, percentile, ratio_of_rounds


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (50, 5.0), (90, 9.0), (91, 10.0), (99, 10.0), (100, 10.0)]
)
def test_percentile_is_one_of_the_values(percent: float, expected: float) -> None:
    """A step of 12 ms that never happened must not be reported as the 99th percentile."""
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == expected


def test_one_value_is_all_its_percentiles() -> None:
    """One round is enough for a report."""
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0


def test_spread_of_many_is_the_middle_half() -> None:
    """One disturbed round of eight must not make the spread."""
    spread = Spread.of([1, 2, 3, 4, 5, 6, 7, 1000])
    assert (spread.median, spread.low, spread.high) == (4.5, 2, 6)


def test_spread_of_few_is_all_of_them() -> None:
    """The quartiles of three values would hide two of them."""
    assert Spread.of([5, 1, 3]) == Spread(3, 1, 5, 3)


def test_ratio_is_taken_within_each_round() -> None:
    """A machine that became three times slower after the first round changes no ratio."""
    ratio = ratio_of_rounds([1.0, 3.0, 3.0], [2.0, 6.0, 6.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
