"""How much of a prompt a step may read: by hand, from made-up measurements."""

from __future__ import annotations

import pytest
from mock_engine import CONFIG

from ortolan.runtime.engine.pace import Pace, attention_share
from ortolan.runtime.params import EngineConfig

MARGIN = 0.8  # of the bound is used


def pace(share: float = 0.0, **settings: float) -> Pace:
    return Pace(EngineConfig(**settings), share)  # type: ignore[arg-type]


def test_nothing_is_bounded_before_anything_was_measured_or_without_running_requests() -> None:
    fresh = pace()
    assert fresh.budget_s(3) is None
    fresh.decoded(3, 0.010)
    assert fresh.budget_s(0) is None
    assert fresh.budget_s(3) is not None


def test_what_is_left_of_the_bound_after_the_step_itself() -> None:
    """With four plain steps of 10 ms: 0.8 * 40 ms - 10 ms."""
    known = pace(gap_steps=4.0)
    known.decoded(2, 0.010)
    assert known.budget_s(2) == pytest.approx(MARGIN * 0.040 - 0.010)


@pytest.mark.parametrize(("gap_ms", "bound_s"), [(20.0, 0.020), (100.0, 0.040)])
def test_the_stricter_of_two_bounds_holds(gap_ms: float, bound_s: float) -> None:
    known = pace(gap_steps=4.0, gap_ms=gap_ms)
    known.decoded(2, 0.010)
    assert known.budget_s(2) == pytest.approx(MARGIN * bound_s - 0.010)


def test_a_bound_below_a_plain_step_leaves_nothing_rather_than_less() -> None:
    known = pace(gap_ms=5.0)
    known.decoded(2, 0.010)
    assert known.budget_s(2) == 0.0
    known.prefilled([10], [0], 0.010)
    assert known.tokens(0.0, 0) == 0


def test_steps_are_known_by_their_rows_and_guessed_from_the_nearest() -> None:
    """Sixteen rows take longer than one; the bound is in steps of the same kind."""
    known = pace()
    assert known.plain_step_s(1) is None
    known.decoded(1, 0.010)
    known.decoded(8, 0.020)
    assert [known.plain_step_s(rows) for rows in (1, 3, 6, 8, 16)] == [
        0.010,
        0.010,
        0.020,
        0.020,
        0.020,
    ]


def test_measurements_are_smoothed() -> None:
    """One slow step, by another process's fault, must not let prompts take four times as long."""
    known = pace()
    for _ in range(3):
        known.decoded(1, 0.010)
    known.decoded(1, 0.100)
    assert known.plain_step_s(1) == pytest.approx(0.010 + 0.25 * 0.090)
    known.prefilled([10], [0], 0.010)  # 1 ms a token
    known.prefilled([10], [0], 0.050)  # then 5
    assert known.tokens(0.020, 0) == int(0.020 / 0.002)


def test_tokens_before_a_measurement_are_a_guess_and_then_what_was_measured() -> None:
    fresh = pace()
    assert fresh.tokens(1.0, 0) == 32
    fresh.prefilled([30, 10], [0, 0], 0.040)  # rows count together
    assert fresh.tokens(0.0205, 0) == 20


def test_tokens_far_into_a_prompt_cost_more() -> None:
    """Attention to 1,000 earlier tokens, each 0.001 of a token's work, doubles it."""
    known = pace(share=0.001)
    known.prefilled([10], [995], 0.020)  # 10 tokens at twice the work: 1 ms per unit
    assert known.tokens(0.101, 0) == pytest.approx(100 / 1.05, abs=1)
    assert known.tokens(0.101, 1000) == pytest.approx(100 / 2.02, abs=1)
    tokens = known.tokens(0.5, 2000)
    assert tokens * (1 + 0.001 * (2000 + tokens / 2)) <= 500  # never more than fits


def test_attention_share_by_hand() -> None:
    """One head of 2 out of 4, one KV head, an inner size of 4: 2 * 2 over 4 * 8 + 3 * 16."""
    assert attention_share(CONFIG) == pytest.approx(4 / (4 * (2 * 2 + 2 * 2) + 3 * 4 * 4))
