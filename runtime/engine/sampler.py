"""Logits to tokens: finds the likeliest of each row and draws one of them.

A row's token depends on its logits, its settings, its seed and its position alone: not on the
other rows, nor on how many candidates were fetched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_logits import Logits, on_host
from ortolan.runtime.engine.sampler_choice import Candidates, choose
from ortolan.runtime.engine.sampler_graph import SampleGraph
from ortolan.runtime.engine.sampler_host import HostSampler
from ortolan.runtime.engine.sampler_row import FloatArray, SamplerRow
from ortolan.runtime.params import SamplingParams

# Candidates fetched at first, the factor while they do not suffice, and where to give up and
# fetch all: of one row of 49,152, that takes 0.02, 0.03, 0.5, 3.2 and 5.0 ms for k = 64, 512,
# 4,096, 32,768 and all.
_FIRST_CANDIDATES = 64
_MORE = 8
_MOST_CANDIDATES = 4096


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token. Natural-log probabilities are the model's own, before any setting.

    `logprob` is None unless asked for; `top_logprobs` holds (token id, logprob), likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws tokens by means of a session of the sampling graph (see graphs/sample.py).

    `num_valid`: ids from here on, past the tokenizer's size, are never sampled. `device`: where
    logits lie, if not on the host.
    Not safe for use from two threads at once: a call uses the buffers of the one before.
    """

    def __init__(
        self, session: ort.InferenceSession, num_valid: int, device: Device | None = None
    ) -> None:
        self._graph = SampleGraph(session, num_valid, device)  # for logits on a device
        self._host = HostSampler(num_valid)
        self._num_valid = num_valid
        self._neutral = SamplerRow(SamplingParams(temperature=0.0), (), num_valid)

    def sample(self, logits: Logits, rows: Sequence[SamplerRow]) -> list[Sampled | EngineError]:
        """One token per row, drawn from `logits` float32 [batch, vocab], batch >= len(rows).

        Rows are read, not changed: `append` to them the tokens that you keep. A row whose logits
        hold NaN or +inf, or nothing above -inf, gets an EngineError in its place; the others are
        not affected.
        """
        drawn: list[Sampled | EngineError | None] = [None] * len(rows)
        if isinstance(logits, np.ndarray):
            for index, row in enumerate(rows):
                # Logits at hand and only the largest wanted: numpy's argmax is ten times faster.
                if row.greedy and row.params.logprobs is None:
                    drawn[index] = self._argmax(logits[index], row)
        pending = [index for index, result in enumerate(drawn) if result is None]
        k = max((self._first_k(rows[index]) for index in pending), default=1)
        unscored: dict[int, tuple[int, float]] = {}  # row -> token and its own logit
        while pending:
            block, block_rows, places = self._block(logits, rows, pending)
            found = self._candidates(block, block_rows, k)
            self._draw(found, rows, pending, places, drawn, unscored)
            pending = [index for index in pending if drawn[index] is None]
            k = min(k * _MORE, self._num_valid) if k < _MOST_CANDIDATES else self._num_valid
        if unscored:
            self._score(logits, rows, unscored, drawn)
        return [result for result in drawn if result is not None]

    def finite(self, logits: Logits) -> bool:
        """Whether the only row of logits [1, vocab] is."""
        if isinstance(logits, np.ndarray):
            return math.isfinite(float(logits.max()))
        found = self._graph.run_all(logits.picked(), [self._neutral], 1)
        return math.isfinite(float(found.log_sum_exp[0]))

    def score(self, logits: Logits, token_ids: Sequence[int], count: int) -> list[Sampled]:
        """Logprobs of given tokens, one per row of logits [n, vocab], and the `count` likeliest.

        Raises EngineError for logits that are not finite.
        """
        logits = on_host(logits)  # any token may be asked for, not only the likeliest
        neutral = [self._neutral] * len(token_ids)
        found = self._candidates(logits, neutral, self._candidates_for(max(1, count)))
        if not np.isfinite(found.log_sum_exp).all():
            raise not_finite()
        return [
            _scored(found, place, token_id, float(logits[place, token_id]), count)
            for place, token_id in enumerate(token_ids)
        ]

    def _argmax(self, logits: FloatArray, row: SamplerRow) -> Sampled | EngineError:
        valid = self._host.adjusted(logits, row)
        token_id = int(valid.argmax())  # lowest id on ties; a NaN counts as largest
        return Sampled(token_id) if math.isfinite(valid[token_id]) else not_finite()

    def _candidates(self, logits: Logits, rows: Sequence[SamplerRow], k: int) -> Candidates:
        if isinstance(logits, np.ndarray):
            return self._host.run(logits, rows, k)
        return self._graph.run_all(logits.picked(), rows, k)

    def _first_k(self, row: SamplerRow) -> int:
        wanted = row.params.logprobs or 1
        if not row.greedy:
            wanted = max(wanted, row.params.top_k, _FIRST_CANDIDATES)
        return self._candidates_for(wanted)

    def _candidates_for(self, wanted: int) -> int:
        """A number of candidates that covers `wanted`: few different ones, for few bindings."""
        if wanted > 1:
            wanted = max(_FIRST_CANDIDATES, 1 << (wanted - 1).bit_length())
        return min(wanted, self._num_valid)

    def _block(
        self, logits: Logits, rows: Sequence[SamplerRow], wanted: list[int]
    ) -> tuple[Logits, list[SamplerRow], Sequence[int]]:
        """Logits to run over, the row state of each, and where in them the `wanted` rows are."""
        if len(wanted) < len(rows):
            logits = logits[wanted]
        elif len(rows) < len(logits):
            logits = logits[: len(rows)]
        return logits, [rows[index] for index in wanted], range(len(wanted))

    def _draw(
        self,
        found: Candidates,
        rows: Sequence[SamplerRow],
        pending: list[int],
        places: Sequence[int],
        drawn: list[Sampled | EngineError | None],
        unscored: dict[int, tuple[int, float]],
    ) -> None:
        """Draw the pending rows' tokens from the candidates, where these suffice."""
        with np.errstate(invalid="ignore"):  # rows of NaN or -inf, refused below
            weights = found.logits.astype(np.float64)
            weights -= weights[:, :1]
            weights /= found.temperature[:, None]
            np.exp(weights, out=weights)
        cumulative = weights.cumsum(axis=1)
        log_sum_exp: list[float] = found.log_sum_exp.tolist()
        for index, place in zip(pending, places, strict=True):
            row, params = rows[index], rows[index].params
            if not math.isfinite(log_sum_exp[place]):
                drawn[index] = not_finite()
                continue
            choice: int | None = 0
            if not row.greedy:
                total = math.exp(log_sum_exp[place])
                choice = choose(
                    weights[place],
                    cumulative[place],
                    total,
                    params,
                    self._num_valid,
                    row.uniform(),
                )
            if choice is None:
                continue
            token_id = int(found.ids[place, choice])
            drawn[index] = Sampled(token_id)
            if params.logprobs is None:
                continue
            raw = float(found.raw_logits[place, choice])
            if row.num_adjusted or row.temperature != 1.0:
                unscored[index] = token_id, raw
            else:
                drawn[index] = _scored(found, place, token_id, raw, params.logprobs)

    def _score(
        self,
        logits: Logits,
        rows: Sequence[SamplerRow],
        unscored: dict[int, tuple[int, float]],
        drawn: list[Sampled | EngineError | None],
    ) -> None:
        """Add logprobs where the first run had adjusted the distribution: run without."""
        # In the rows' order, which is not that of drawing: some rows take more rounds.
        unscored = dict(sorted(unscored.items()))
        block, block_rows, places = self._block(logits, rows, list(unscored))
        counts = {index: rows[index].params.logprobs or 0 for index in unscored}
        k = self._candidates_for(max(1, *counts.values()))
        found = self._candidates(block, [self._neutral] * len(block_rows), k)
        for place, (index, (token_id, raw)) in zip(places, unscored.items(), strict=True):
            drawn[index] = _scored(found, place, token_id, raw, counts[index])


def _scored(found: Candidates, place: int, token_id: int, raw_logit: float, count: int) -> Sampled:
    """A token with its logprob and the `count` likeliest ones', from an unadjusted run."""
    scores = found.raw_logits[place].astype(np.float64)
    shift = float(scores[0]) + float(found.log_sum_exp[place])
    top = tuple(
        zip(found.ids[place, :count].tolist(), (scores[:count] - shift).tolist(), strict=True)
    )
    return Sampled(token_id, raw_logit - shift, top)


def not_finite() -> EngineError:
    """The error for logits that no token can be drawn from."""
    return EngineError(
        "the model's logits hold NaN or infinity, or exclude every token, so that none can be "
        "drawn; check the bundle with: ortolan verify"
    )
