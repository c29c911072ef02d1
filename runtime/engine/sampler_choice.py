"""Which of the sorted candidates a random number picks: top_k, top_p, min_p and the draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ortolan.runtime.engine.sampler_row import FloatArray, IdArray
from ortolan.runtime.params import SamplingParams

Array = NDArray[np.float64]


@dataclass
class Candidates:
    """The likeliest tokens of each row and what their probabilities need; see graphs/sample.py."""

    ids: IdArray  # [batch, k]
    logits: FloatArray  # [batch, k], adjusted, descending
    raw_logits: FloatArray  # [batch, k], the model's own
    log_sum_exp: FloatArray  # [batch], relative to the largest logit; NaN for a broken row
    temperature: FloatArray  # [batch]


def joined(parts: Sequence[Candidates]) -> Candidates:
    """The rows of all parts, one after another."""
    names = [field.name for field in fields(Candidates)]
    return Candidates(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def choose(
    weights: Array,
    cumulative: Array,
    total: float,
    params: SamplingParams,
    num_valid: int,
    uniform: float,
) -> int | None:
    """Index of the picked candidate, or None where more candidates are needed to tell.

    weights [k]: exp((l - largest l) / temperature), descending, over the likeliest tokens;
    cumulative [k]: their running sums; total: the sum over all `num_valid` tokens. If top_k is
    on, k must reach it. The answer does not depend on k, once there is one.

    Filters work in the order of Hugging Face's and each sees what the one before it left: top_k
    likeliest tokens (ties: lower ids); of these the fewest whose probabilities reach top_p; of
    these the ones at least min_p times as likely as the first. What is left is a prefix of the
    sorted tokens, renormalized; the draw inverts its cumulative distribution.
    """
    limit = min(params.top_k or num_valid, num_valid)
    known = min(len(weights), limit)
    complete = known == limit
    weights, cumulative = weights[:known], cumulative[:known]
    if params.top_k:
        assert complete, "top_k needs at least top_k candidates"
        total = float(cumulative[-1])

    if not (params.top_k or params.top_p < 1.0 or params.min_p > 0.0):
        # No filter: the end of the list matters only if the draw falls beyond what is known.
        index = int(cumulative.searchsorted(uniform * total, side="right"))
        if index == known:
            # With all known, rounding of `total` is left: the last token with any weight.
            last = int(cumulative.searchsorted(cumulative[-1], side="left"))
            return last if complete else None
        return index

    end = known
    if params.top_p < 1.0:
        # A token stays if what comes before it is less than top_p.
        end = int(cumulative.searchsorted(params.top_p * total, side="left")) + 1
    if params.min_p > 0.0:
        end = min(end, known - int(weights[::-1].searchsorted(params.min_p, side="left")))
    if end >= known:
        if not complete:
            return None  # the filters may reach beyond what is known
        end = known
    kept = cumulative[:end]
    # The first weight is 1, and a number below 1 times x >= 1 rounds to less than x: in range.
    return int(kept.searchsorted(uniform * float(kept[-1]), side="right"))
