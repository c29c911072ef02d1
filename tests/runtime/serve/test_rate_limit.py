"""The token bucket."""

from __future__ import annotations

import pytest
from mock_engine import Clock

from ortolan.runtime.serve.rate_limit import Bucket


def test_minute_of_requests_passes_at_once_and_then_one_by_one() -> None:
    """A burst is what a minute allows; after it, the rate is held to the second."""
    clock = Clock()
    bucket = Bucket(60, clock)
    for _ in range(60):
        assert bucket.wait_s == 0
        bucket.take(1)
    assert bucket.wait_s == pytest.approx(1)
    clock.now += 0.5
    assert bucket.wait_s == pytest.approx(0.5)


@pytest.mark.parametrize("per_minute", [1, 7, 60, 999_983])
def test_waiting_as_long_as_was_said_is_enough(per_minute: int) -> None:
    """A client that keeps to Retry-After must not be refused again for a rounding error."""
    clock = Clock(now=1e6 / 3)
    bucket = Bucket(per_minute, clock)
    bucket.take(per_minute)
    for _ in range(50):
        clock.now += bucket.wait_s
        assert bucket.wait_s == 0
        bucket.take(1)
        assert bucket.wait_s > 0


def test_debt_is_paid_before_anything_passes() -> None:
    """An answer's length shows only as it grows; on average the limit holds all the same."""
    clock = Clock()
    bucket = Bucket(600, clock)
    bucket.take(1200)
    assert bucket.wait_s == pytest.approx(60.1)
    clock.now += 60.1
    assert bucket.wait_s == 0


def test_quiet_hours_save_up_one_minute_only() -> None:
    """Otherwise a key that slept all night could bring everything down in the morning."""
    clock = Clock()
    bucket = Bucket(10, clock)
    clock.now += 36_000
    bucket.take(10)
    assert bucket.wait_s > 0


def test_what_is_given_back_is_there_again() -> None:
    """A request that the engine refuses costs no tokens, nor does it earn any."""
    bucket = Bucket(10, Clock())
    bucket.take(10)
    bucket.take(-10)
    bucket.take(-10)
    assert bucket.wait_s == 0
    bucket.take(10)
    assert bucket.wait_s > 0
