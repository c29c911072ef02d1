"""Pieces that GGUF's block formats share: half floats, codes packed into bits, tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# What a block format's decoder makes of raw blocks uint8 [n, bytes]: codes int8 [n, elements],
# scales float32 [n, elements / B], and offsets of that shape where it has some.
Decoded = tuple[Array, Array, Array | None]


def words(blocks: Array, start: int, stop: int, dtype: str) -> Array:
    """Bytes `start` to `stop` of each block as numbers: "<f2", "<u2" or "<u4"."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def halves(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return words(blocks, at, at + 2, "<f2").astype(np.float32)


def fields(packed: Array, group: int, bits: int) -> Array:
    """Bytes [n, m] -> the fields of 1, 2 or 4 bits that they hold, uint8 [n, m * 8 / bits].

    Of each `group` bytes, first the lowest field of every byte, then the next of every byte.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, group) >> shifts
    parts &= (1 << bits) - 1
    return parts.reshape(len(packed), -1)
