"""How many prompt tokens a step may read."""

from __future__ import annotations

import pytest

from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine.pace import LEAST_CHUNK, SMALLEST_CHUNK, Pace, attention_share
from ortolan.runtime.params import EngineConfig

SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    max_context=8192,
    tie_embeddings=True,
)
PLAIN_S = 0.0193  # a step of 4 rows
# Milliseconds of one call on SmolLM2, one thread: tokens -> {tokens before: ms}.
MEASURED = {
    2: {0: 10.9, 500: 15.1, 1000: 20.1, 2000: 33.2, 3800: 54.0},
    8: {0: 23.4, 500: 29.9, 1000: 37.0, 2000: 57.2, 3800: 83.0},
    32: {0: 70.1, 500: 87.9, 1000: 107.3, 2000: 149.5, 3800: 217.4},
    128: {0: 275.1, 500: 335.2, 1000: 392.1, 2000: 507.0, 3800: 730.1},
}


def measured_pace(**settings: float) -> Pace:
    """A pace that has seen plain steps and one prefill call, as it was measured."""
    pace = Pace(EngineConfig(**settings), attention_share(SMOLLM2))  # type: ignore[arg-type]
    for _ in range(100):  # a machine without noise
        pace.decoded(4, PLAIN_S)
    pace.prefilled([32], [0], MEASURED[32][0] / 1e3)
    return pace


@pytest.mark.parametrize("size", MEASURED)
@pytest.mark.parametrize("start", MEASURED[2])
def test_cost_of_a_call_is_foreseen(size: int, start: int) -> None:
    """From one call, any other's: an estimate by tokens alone is 2.5 times too low at 3,800."""
    pace = measured_pace(gap_steps=100.0)
    most_s = PLAIN_S * 100
    seconds = MEASURED[size][start] / 1e3
    found = pace.tokens(4, start, spent_s=most_s - PLAIN_S - seconds)
    assert found == pytest.approx(size, rel=0.2, abs=2)


def test_a_long_past_shrinks_what_is_read_below_the_least_that_pays() -> None:
    """The bound comes first: eight tokens after 3,800 take 5.3 plain steps of four short rows."""
    pace = measured_pace()
    assert pace.tokens(4, 0, 0.0) > LEAST_CHUNK
    assert SMALLEST_CHUNK <= pace.tokens(4, 3800, 0.0) < LEAST_CHUNK


def test_where_no_bound_can_be_kept_prompts_still_end() -> None:
    pace = measured_pace(gap_ms=5.0)  # less than a plain step
    assert pace.tokens(4, 3800, 0.0) == LEAST_CHUNK


def test_scatter_leaves_a_margin() -> None:
    """On a busy machine the same bound is kept by reading less."""
    quiet, busy = measured_pace(), measured_pace()
    for turn in range(100):
        busy.decoded(4, PLAIN_S * (0.8 if turn % 2 else 1.2))
    assert busy.tokens(4, 0, 0.0) < quiet.tokens(4, 0, 0.0)


def test_what_a_prompt_slows_down_is_not_taken_for_a_plain_step() -> None:
    """Decoding after a piece of a prompt is slower; a bound in such steps would be too wide."""
    pace = measured_pace()
    bound_s = pace.bound_s(4)
    for _ in range(200):
        pace.decoded(4, PLAIN_S * 1.4, beside_prompt=True)
    assert pace.bound_s(4) == pytest.approx(bound_s)
    assert pace.tokens(4, 0, 0.0) < measured_pace().tokens(4, 0, 0.0)


def test_a_machine_that_became_slower_has_slower_plain_steps() -> None:
    """A bound in steps of long ago would leave hardly any room for prompts."""
    pace = measured_pace()
    pace.decoded(4, PLAIN_S)
    bound_s = pace.bound_s(4)
    for _ in range(50):
        pace.prefilled([32], [0], 2 * MEASURED[32][0] / 1e3)
        pace.decoded(4, 2.5 * PLAIN_S, beside_prompt=True)
    assert pace.bound_s(4) == pytest.approx(2 * bound_s)


def test_rows_without_plain_steps_have_a_bound_all_the_same() -> None:
    """Under a steady load every step reads a prompt; few rows' plain steps say nothing of many."""
    pace = measured_pace()
    pace.decoded(16, 3 * PLAIN_S, beside_prompt=True)
    assert pace.bound_s(16) == pytest.approx(12 * PLAIN_S)
    for _ in range(50):  # and what was seen once is not believed for ever
        pace.decoded(4, 8 * PLAIN_S, beside_prompt=True)
    assert pace.bound_s(4) == pytest.approx(4 * 8 * PLAIN_S / 1.6)


def test_without_running_rows_there_is_no_bound() -> None:
    assert measured_pace().tokens(0, 3800, 0.0) is None
