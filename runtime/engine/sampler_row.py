"""What the sampler remembers of one request: adjustments of logits, and its random numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ortolan.runtime.params import SamplingParams

FloatArray = NDArray[np.float32]
IdArray = NDArray[np.int64]

# Temperatures are float32 in the graph, and their reciprocal has to be finite. So cold, only
# tokens whose logits are equal share the probability: clamping changes no outcome.
_COLDEST, _HOTTEST = 1e-30, 1e30
# Logits are below 1e4: at the coldest they must still fit float32 when a penalty has scaled them.
_LEAST_SCALE, _MOST_SCALE = 1e-4, 1e4

# Random numbers come in blocks, since setting up a generator costs 13 us and a number 0.1 us.
_DRAWS_PER_BLOCK = 64
_WORDS_PER_COUNT = 4  # 64-bit words that Philox makes per tick of its counter


class SamplerRow:
    """One request's sampling state; `append` keeps it up to date in constant time per token.

    An adjusted id has a scale and a bias: logit -> (l > 0 ? l / scale : l * scale) + bias.
    `repetition_penalty` is the scale of every token of the prompt and the answer (as in Hugging
    Face); the bias is `logit_bias`, minus `presence_penalty` and, per occurrence,
    `frequency_penalty` for tokens of the answer (as in OpenAI).

    `num_valid`: ids from here on are never sampled; such ids need no adjustment.
    `choice` tells the answers of one request apart when it asks for several (n above 1).
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], num_valid: int, choice: int = 0
    ) -> None:
        self.params = params
        self.greedy = params.greedy
        # Drawn once, so that a replay after preemption repeats its tokens.
        self.seed = int.from_bytes(os.urandom(8)) if params.seed is None else params.seed
        self.temperature = 1.0 if self.greedy else min(max(params.temperature, _COLDEST), _HOTTEST)
        self.position = 0  # generated tokens so far
        self._choice = choice
        self._num_valid = num_valid
        self._draws: list[int] = []
        self._draws_block = -1
        self._counts: dict[int, int] = {}  # token id -> occurrences in the answer
        self._slots: dict[int, int] = {}  # token id -> index into the arrays below
        self._ids: IdArray = np.zeros(0, np.int64)
        self._scale: FloatArray = np.zeros(0, np.float32)
        self._bias: FloatArray = np.zeros(0, np.float32)
        self._penalizes = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        for token_id, bias in params.logit_bias.items():
            self._adjust(token_id, 1.0, bias)
        self._repetition = min(max(params.repetition_penalty, _LEAST_SCALE), _MOST_SCALE)
        if params.repetition_penalty != 1.0:
            for token_id in set(prompt_ids):
                bias = params.logit_bias.get(token_id, 0.0)
                self._adjust(token_id, self._repetition, bias)

    @property
    def num_adjusted(self) -> int:
        """How many ids have an adjustment."""
        return len(self._slots)

    def append(self, token_id: int) -> None:
        """Take note of a generated token. Every one belongs here, sampled or replayed."""
        self.position += 1
        if self._penalizes:
            params = self.params
            count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
            # From the count, not by adding up: no drift over a long answer.
            penalty = params.presence_penalty + params.frequency_penalty * count
            bias = params.logit_bias.get(token_id, 0.0) - penalty
            self._adjust(token_id, self._repetition, bias)

    def uniform(self) -> float:
        """The random number in [0, 1) of the current position.

        A function of seed, choice and position alone, so that it does not matter what else is
        running or what was computed before. Negative seeds count modulo 2**64.
        Source: Philox4x64-10, Salmon et al. 2011; numpy documents the stream as stable.
        """
        block, offset = divmod(self.position, _DRAWS_PER_BLOCK)
        if block != self._draws_block:
            key = np.array([self.seed % 2**64, self._choice], np.uint64)
            ticks = _DRAWS_PER_BLOCK // _WORDS_PER_COUNT
            generator = np.random.Philox(key=key, counter=block * ticks)
            self._draws = generator.random_raw(_DRAWS_PER_BLOCK).tolist()
            self._draws_block = block
        return (self._draws[offset] >> 11) * 2.0**-53

    def fill(self, ids: IdArray, scale: FloatArray, bias: FloatArray) -> None:
        """Write the adjustments into [m] each, m at least `num_adjusted`, padding harmlessly."""
        count = self.num_adjusted
        if count == 0:
            ids[:], scale[:], bias[:] = 0, 1.0, 0.0
            return
        # Pad by an entry of the row's own: a neutral one could contradict a real one of its id.
        for target, source in ((ids, self._ids), (scale, self._scale), (bias, self._bias)):
            target[:count] = source[:count]
            target[count:] = source[0]

    def apply(self, logits: FloatArray) -> None:
        """Adjust `logits` [vocab] in place: the same float32 arithmetic as the graph's."""
        count = self.num_adjusted
        ids, scale = self._ids[:count], self._scale[:count]
        raw = logits[ids]
        logits[ids] = np.where(raw > 0, raw / scale, raw * scale) + self._bias[:count]

    def _adjust(self, token_id: int, scale: float, bias: float) -> None:
        if token_id >= self._num_valid:
            return
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._grow()
            self._ids[slot] = token_id
        self._scale[slot] = scale
        self._bias[slot] = bias

    def _grow(self) -> None:
        size = max(2 * len(self._ids), 16)
        for name in ("_ids", "_scale", "_bias"):
            old = getattr(self, name)
            new = np.zeros(size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
