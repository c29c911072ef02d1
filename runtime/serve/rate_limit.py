"""A limit per minute: the token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable

# Whoever waits as long as was said must not be refused for a rounding error.
_ROUNDING = 1e-6


class Bucket:
    """Holds at most what a minute allows and fills steadily; see Tanenbaum, Computer Networks.

    What is taken may exceed what is there, since an answer's length shows only as it grows: the
    debt is then waited for, so that the limit holds over time. clock: seconds that never go back.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._clock = clock
        self._filled_s = clock()

    @property
    def wait_s(self) -> float:
        """Seconds until there is room for one; 0 if there is now."""
        missing = 1 - self._fill()
        return 0.0 if missing <= _ROUNDING else missing * 60 / self.per_minute

    def take(self, amount: float) -> None:
        """Whether it is there or not; a negative amount gives back."""
        self._level = min(self._fill() - amount, self.per_minute)

    def _fill(self) -> float:
        now_s = self._clock()
        grown = self._level + (now_s - self._filled_s) * self.per_minute / 60
        self._level, self._filled_s = min(grown, self.per_minute), now_s
        return self._level
