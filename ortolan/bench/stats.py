"""Medians, percentiles and spreads of few, noisy samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    assert values
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


@dataclass(frozen=True)
class Spread:
    """Median, and between which values the middle half lies (or all, of fewer than four)."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values), len(values))
        return cls(
            statistics.median(values),
            percentile(values, 25),
            percentile(values, 75),
            len(values),
        )

    @property
    def percent(self) -> float:
        """Half the width over the median, in per cent."""
        return 50 * (self.high - self.low) / self.median if self.median else 0.0


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """theirs / ours round by round: what else the machine did hit both sides of a round alike."""
    return Spread.of([b / a for a, b in zip(ours, theirs, strict=True)])
