"""What the sampling graph does, in numpy: for logits that lie in host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ortolan.runtime.engine.sampler_choice import Candidates
from ortolan.runtime.engine.sampler_row import FloatArray, IdArray, SamplerRow

# Columns are folded into blocks of so many before the k-th largest is looked for.
_BLOCK = 64


class HostSampler:
    """Finds candidates as `SampleGraph` does, a row at a time, with nothing to bind or dispatch.

    At one row of 49,152 logits it takes less than half of the graph's time: the graph copies,
    scales and sums in passes of its own, and they wake the thread pool. log_sum_exp may differ
    from the graph's in the last bits; the candidates do not.
    """

    def __init__(self, num_valid: int) -> None:
        self._num_valid = num_valid
        self._adjusted: FloatArray = np.empty(num_valid, np.float32)
        self._exps: FloatArray = np.empty(num_valid, np.float32)

    def adjusted(self, logits: FloatArray, row: SamplerRow) -> FloatArray:
        """The row's valid logits as its settings change them; holds until the next call."""
        valid = logits[: self._num_valid]
        if not row.num_adjusted:
            return valid
        np.copyto(self._adjusted, valid)
        row.apply(self._adjusted)
        return self._adjusted

    def run(self, logits: FloatArray, rows: Sequence[SamplerRow], k: int) -> Candidates:
        """The k likeliest tokens of each row of `logits` [batch, vocab], batch == len(rows).

        log_sum_exp is 0 where nothing asks for it: where top_k cuts, and no logprob is wanted.
        """
        batch = len(rows)
        found = Candidates(
            ids=np.zeros((batch, k), np.int64),
            logits=np.zeros((batch, k), np.float32),
            raw_logits=np.zeros((batch, k), np.float32),
            log_sum_exp=np.full(batch, np.nan, np.float32),
            temperature=np.array([row.temperature for row in rows], np.float32),
        )
        for place, row in enumerate(rows):
            adjusted = self.adjusted(logits[place], row)
            largest = adjusted.max()  # NaN if there is one
            if not math.isfinite(largest):
                continue
            ids = likeliest(adjusted, k)
            found.ids[place] = ids
            found.logits[place] = adjusted[ids]
            found.raw_logits[place] = logits[place, ids]
            total = not row.params.top_k or row.params.logprobs is not None
            temperature = found.temperature[place]
            found.log_sum_exp[place] = (
                self._log_sum_exp(adjusted, largest, temperature) if total else 0.0
            )
        return found

    def _log_sum_exp(
        self, logits: FloatArray, largest: np.float32, temperature: np.float32
    ) -> float:
        # Subtract first, scale second: as the graph does, for the sake of tiny temperatures.
        exps = np.subtract(logits, largest, out=self._exps)
        with np.errstate(over="ignore"):  # to -inf, whose exponential is 0
            exps *= np.float32(1.0) / temperature
        np.exp(exps, out=exps)
        # Always from the same buffer: neither rows nor memory's alignment change the bits.
        return float(np.log(exps.sum()))


def likeliest(logits: NDArray[np.float32], k: int) -> IdArray:
    """Ids of the k largest of `logits` [n], descending, ties by lower id; none may be NaN.

    The k-th largest of the blocks' largest is a threshold that at least k logits reach, and few
    more do: only these are sorted. That reads the logits twice; a partition moves them.
    """
    maxima, blocks = logits, len(logits) // _BLOCK
    if k <= blocks:
        # Columns are the blocks, so that maxima are taken lane by lane.
        maxima = logits[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
    threshold = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
    ids = np.flatnonzero(logits >= threshold)
    order = np.argsort(-logits[ids], kind="stable")[:k]
    found: IdArray = ids[order]
    return found
