"""GGUF's block formats as integer codes, scales and offsets, without loss.

Source of the layouts: ggml's block structures, and `gguf.quants`, against which they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as GgmlType

from ortolan.export.weights import Array, Weight
from ortolan.graphs.formats import WeightFormat


@dataclass(frozen=True)
class BlockFormat:
    """A GGUF tensor type: the format it becomes, and how its raw rows are read.

    read: raw bytes uint8 [N, bytes per row] -> Weight [N, K].
    """

    format: WeightFormat
    read: Callable[[Array, WeightFormat], Weight]


def _blocks(raw: Array, block_bytes: int) -> Array:
    return raw.reshape(raw.shape[0], -1, block_bytes)


def _halves(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of each block, as float32 [N, blocks]."""
    return (
        np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)
    )


def _nibbles(packed: Array) -> Array:
    """Bytes [N, blocks, 16] -> codes int8 [N, blocks * 32]: low nibbles first, less 8."""
    both = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8)
    both -= 8
    return both.reshape(packed.shape[0], -1)


def _read_q4_0(raw: Array, fmt: WeightFormat) -> Weight:
    blocks = _blocks(raw, 18)
    return Weight(fmt, _nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _read_q4_1(raw: Array, fmt: WeightFormat) -> Weight:
    # w = d q + m = d (q - 8) + (m + 8 d): signed codes, and an offset per block.
    blocks = _blocks(raw, 20)
    scale, minimum = _halves(blocks, 0), _halves(blocks, 2)
    with np.errstate(invalid="ignore"):  # what is not finite is refused by the reader
        offset = minimum + 8 * scale
    return Weight(fmt, _nibbles(blocks[..., 4:]), scale, offset)


def _read_q8_0(raw: Array, fmt: WeightFormat) -> Weight:
    blocks = _blocks(raw, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Weight(fmt, codes.reshape(raw.shape[0], -1), _halves(blocks, 0))


def _read_bf16(raw: Array, fmt: WeightFormat) -> Weight:
    return Weight(fmt, np.ascontiguousarray(raw).view(ml_dtypes.bfloat16))


def _read_float(raw: Array, fmt: WeightFormat) -> Weight:
    return Weight(fmt, raw)  # the gguf package has given it its dtype already


BLOCK_FORMATS: Mapping[GgmlType, BlockFormat] = {
    GgmlType.F32: BlockFormat(WeightFormat("float32"), _read_float),
    GgmlType.F16: BlockFormat(WeightFormat("float16"), _read_float),
    GgmlType.BF16: BlockFormat(WeightFormat("bfloat16"), _read_bf16),
    GgmlType.Q4_0: BlockFormat(WeightFormat("int4", 32), _read_q4_0),
    GgmlType.Q4_1: BlockFormat(WeightFormat("int4", 32, affine=True), _read_q4_1),
    GgmlType.Q8_0: BlockFormat(WeightFormat("int8", 32), _read_q8_0),
}
