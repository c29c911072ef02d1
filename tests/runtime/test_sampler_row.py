"""Penalties against values worked out by hand, random numbers against Philox written out."""

from collections.abc import Sequence

import numpy as np
import pytest

from ortolan.runtime.engine.sampler_row import SamplerRow
from ortolan.runtime.params import SamplingParams

NUM_VALID = 997


def row_of(
    params: SamplingParams, prompt: Sequence[int] = (), answer: Sequence[int] = ()
) -> SamplerRow:
    row = SamplerRow(params, prompt, NUM_VALID)
    for token_id in answer:
        row.append(token_id)
    return row


def adjusted_by(row: SamplerRow, logits: list[float]) -> list[float]:
    out = np.array(logits, np.float32)
    row.apply(out)
    return [round(float(value), 5) for value in out]


def test_repetition_penalty_counts_prompt_and_answer_once() -> None:
    """As in Hugging Face: divide what is positive, multiply what is not, however often seen."""
    row = row_of(SamplingParams(repetition_penalty=2.0), prompt=[0, 1, 0], answer=[2, 2])
    assert adjusted_by(row, [4.0, -4.0, 1.0, 3.0]) == [2.0, -8.0, 0.5, 3.0]


def test_presence_and_frequency_count_the_answer_only() -> None:
    """As in OpenAI: presence once, frequency per occurrence, the prompt not at all."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    row = row_of(params, prompt=[3, 3], answer=[0, 1, 1, 1])
    assert adjusted_by(row, [4.0, -4.0, 1.0, 3.0]) == [3.25, -5.25, 1.0, 3.0]


def test_bias_adds_to_penalties() -> None:
    """The scale comes first, so that logit_bias means the same with every penalty."""
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, logit_bias={0: 10.0, 1: -3.0, 2: 1.0}
    )
    row = row_of(params, prompt=[1], answer=[0])
    assert adjusted_by(row, [4.0, 4.0, 4.0, 4.0]) == [11.5, -1.0, 5.0, 4.0]


def stream(row: SamplerRow, count: int = 200) -> list[float]:
    found = []
    for _ in range(count):
        found.append(row.uniform())
        row.append(0)
    return found


def philox(seed: int, choice: int, position: int) -> float:
    """Philox4x64-10 written out after Salmon et al. 2011; the first tick is counter 1."""
    words, key, mask = [position // 4 + 1, 0, 0, 0], [seed % 2**64, choice], 2**64 - 1
    for _ in range(10):
        first, third = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (third >> 64) ^ words[1] ^ key[0],
            third & mask,
            (first >> 64) ^ words[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return (words[position % 4] >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 2, -5])
@pytest.mark.parametrize("choice", [0, 3])
def test_a_seed_fixes_the_random_numbers(seed: int, choice: int) -> None:
    """What a seed means must not change with numpy, platform or release."""
    numbers = stream(SamplerRow(SamplingParams(seed=seed), (), NUM_VALID, choice))
    assert numbers == [philox(seed, choice, position) for position in range(200)]
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_other_seeds_and_choices_differ() -> None:
    """Two answers of one request (n above 1) must not be copies."""
    rows = [
        *(row_of(SamplingParams(seed=seed)) for seed in (0, 1, 2, 2**63, -(2**63) + 1)),
        SamplerRow(SamplingParams(seed=0), (), NUM_VALID, choice=1),
        row_of(SamplingParams()),
        row_of(SamplingParams()),
    ]
    assert len({tuple(stream(row, 3)) for row in rows}) == len(rows)


def test_a_replayed_row_goes_on_where_it_was() -> None:
    """A preempted request replays its tokens: its random numbers depend on position alone."""
    row = row_of(SamplingParams(seed=9))
    numbers = stream(row, 100)
    assert row_of(SamplingParams(seed=9), answer=range(70)).uniform() == numbers[70]
    unseeded = row_of(SamplingParams())
    again = row_of(SamplingParams(seed=unseeded.seed))
    assert stream(unseeded, 5) == stream(again, 5)
