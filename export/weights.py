"""Weights as a checkpoint gives them: float arrays, or integer codes with scales per block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.graphs.formats import WeightFormat

Array = npt.NDArray[Any]

_LOOKED_AT = 16 << 20  # bytes at a time
_HUGE = 1e36  # times any code within 8 bits, it is still finite


@dataclass(frozen=True)
class Weight:
    """One matrix [outputs N, inputs K], or a vector [N] of floats.

    Unblocked: `codes` holds the floats themselves. Blocked: codes int8 [N, K], scale float32
    [N, blocks], and offset float32 [N, blocks] where the format is affine. The last block of a row
    is shorter than the others where K is not a multiple of the block's size.
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
        values = self.codes.astype(np.float32)
        whole = self.codes.shape[1] // size * size
        blocks = values[:, :whole].reshape(len(values), -1, size)  # a view
        blocks *= self.scale[:, : whole // size, None]
        values[:, whole:] *= self.scale[:, whole // size :]
        if self.offset is not None:
            blocks += self.offset[:, : whole // size, None]
            values[:, whole:] += self.offset[:, whole // size :]
        return values

    def is_finite(self) -> bool:
        """Whether no element is infinite or NaN."""
        floats = (self.codes, None) if self.scale is None else (self.scale, self.offset)
        if not all(part is None or _all_finite(part) for part in floats):
            return False
        # A scale as MXFP4 can have it, finite itself, may still take its codes beyond float32.
        huge = self.scale is not None and bool((np.abs(self.scale) > _HUGE).any())
        with np.errstate(over="ignore"):
            return not huge or bool(np.isfinite(self.dequantized()).all())

    def as_float32(self) -> Weight:
        """The same matrix stored in float32."""
        return Weight(WeightFormat("float32"), self.dequantized())

    def times(self, factor: float) -> Weight:
        """The same matrix times a number; rounds scales and offsets, of blocked formats alone."""
        if factor == 1.0:
            return self
        assert self.scale is not None
        with np.errstate(over="ignore"):
            return replace(
                self,
                scale=self.scale * np.float32(factor),
                offset=None if self.offset is None else self.offset * np.float32(factor),
            )

    def rows(self, start: int, stop: int) -> Weight:
        """Some of the rows, as views."""
        return self.take_rows(slice(start, stop))

    def columns(self, start: int, stop: int) -> Weight:
        """Some of the inputs K, as views. `start` is where a block begins."""
        scale, offset = self.scale, self.offset
        if scale is not None:
            size = self.format.block_size
            blocks = slice(start // size, -(-stop // size))
            scale = scale[:, blocks]
            offset = None if offset is None else offset[:, blocks]
        return replace(self, codes=self.codes[:, start:stop], scale=scale, offset=offset)

    def take_rows(self, order: npt.NDArray[np.int64] | slice) -> Weight:
        """Rows in another order; exact, since blocks run along K."""
        return replace(
            self,
            codes=self.codes[order],
            scale=None if self.scale is None else self.scale[order],
            offset=None if self.offset is None else self.offset[order],
        )


def _all_finite(array: Array) -> bool:
    """In pieces: the answers for a whole matrix would take up to half its size."""
    lines = np.atleast_1d(array)
    step = max(1, _LOOKED_AT * len(lines) // max(1, array.nbytes))
    return all(
        bool(np.isfinite(lines[start : start + step]).all()) for start in range(0, len(lines), step)
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
