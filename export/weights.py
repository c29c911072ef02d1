"""Weights as a checkpoint gives them: float arrays, or integer codes with scales per block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.graphs.formats import WeightFormat

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Weight:
    """One matrix [outputs N, inputs K], or a vector [N] of floats.

    Unblocked: `codes` holds the floats themselves. Blocked: codes int8 [N, K], scale float32
    [N, K / B], and offset float32 [N, K / B] where the format is affine.
    """

    format: WeightFormat
    codes: Array
    scale: Array | None = None
    offset: Array | None = None

    def dequantized(self) -> Array:
        """The same matrix in float32 [N, K]."""
        if self.scale is None:
            return self.codes.astype(np.float32)
        size = self.format.block_size
        blocks = self.codes.reshape(*self.scale.shape, size).astype(np.float32)
        blocks *= self.scale[..., None]
        if self.offset is not None:
            blocks += self.offset[..., None]
        return blocks.reshape(self.codes.shape)

    def is_finite(self) -> bool:
        """Whether no element is infinite or NaN."""
        floats = (self.codes, None) if self.scale is None else (self.scale, self.offset)
        return all(part is None or bool(np.isfinite(part).all()) for part in floats)

    def as_float32(self) -> Weight:
        """The same matrix stored in float32."""
        return Weight(WeightFormat("float32"), self.dequantized())

    def take_rows(self, order: npt.NDArray[np.int64]) -> Weight:
        """Rows in another order; exact, since blocks run along K."""
        return replace(
            self,
            codes=self.codes[order],
            scale=None if self.scale is None else self.scale[order],
            offset=None if self.offset is None else self.offset[order],
        )


def stack_rows(weights: list[Weight]) -> Weight:
    """Several matrices of one format on one input, as one."""
    first = weights[0]
    if len(weights) == 1:
        return first

    def joined(parts: list[Array | None]) -> Array | None:
        return None if parts[0] is None else np.concatenate([p for p in parts if p is not None])

    return replace(
        first,
        codes=np.concatenate([w.codes for w in weights]),
        scale=joined([w.scale for w in weights]),
        offset=joined([w.offset for w in weights]),
    )
