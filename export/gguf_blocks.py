"""GGUF's tensor types as integer codes, scales and offsets per block, without loss.

The K-quants are in gguf_kquants.py, the IQ formats in gguf_iquants.py. Q8_1 and Q8_K are formats
of activations, not of files. Source of the layouts: ggml's block structures, and `gguf.quants`,
against which they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from gguf import quants

from ortolan.export import gguf_iquants as iq
from ortolan.export import gguf_kquants as kq
from ortolan.export.gguf_unpack import Array, Decoded, fields, halves
from ortolan.export.weights import Weight
from ortolan.graphs.formats import WeightFormat

_SLAB = 1 << 22  # weights unpacked at a time: what is temporary stays at some tens of MB


@dataclass(frozen=True)
class BlockFormat:
    """A GGUF tensor type: the format it becomes, and how its blocks are unpacked.

    decode: raw blocks uint8 [n, bytes] -> codes, scales, offsets; None for floats.
    """

    kind: GgmlType
    format: WeightFormat
    decode: Callable[[Array], Decoded] | None = None

    def read(self, raw: Array) -> Weight:
        """Rows of a tensor as the gguf package gives them -> Weight.

        F32 and F16 come with their dtype, all others as uint8 [N, bytes per row].
        """
        if self.decode is None:
            floats = self.format.dtype == "bfloat16"
            return Weight(
                self.format, np.ascontiguousarray(raw).view(ml_dtypes.bfloat16) if floats else raw
            )
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        rows, width = raw.shape
        columns = width // block_bytes * block_elements
        codes = np.empty((rows, columns), np.int8)
        scale = np.empty((rows, columns // self.format.block_size), np.float32)
        offset = np.empty_like(scale) if self.format.affine else None
        step = max(1, _SLAB // columns)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            blocks = np.ascontiguousarray(raw[part]).reshape(-1, block_bytes)
            with np.errstate(invalid="ignore", over="ignore"):  # refused by the reader, by name
                found, scales, offsets = self.decode(blocks)
            codes[part] = found.reshape(-1, columns)
            scale[part] = scales.reshape(-1, scale.shape[1])
            if offset is not None and offsets is not None:
                offset[part] = offsets.reshape(-1, scale.shape[1])
        return Weight(self.format, codes, scale, offset)


def _decode_q4_0(blocks: Array) -> Decoded:
    codes = fields(blocks[:, 2:], 16, 4).view(np.int8) - np.int8(8)
    return codes, halves(blocks, 0), None


def _decode_q4_1(blocks: Array) -> Decoded:
    # w = d q + m = d (q - 8) + (m + 8 d): signed codes, and an offset per block. Codes about zero
    # also make less of what int8 activations lose at the default accuracy.
    scale = halves(blocks, 0)
    codes = fields(blocks[:, 4:], 16, 4).view(np.int8) - np.int8(8)
    return codes, scale, halves(blocks, 2) + 8 * scale


def _decode_q5_0(blocks: Array) -> Decoded:
    codes = fields(blocks[:, 6:], 16, 4) | (fields(blocks[:, 2:6], 1, 1) << 4)
    return codes.view(np.int8) - np.int8(16), halves(blocks, 0), None


def _decode_q5_1(blocks: Array) -> Decoded:
    codes = fields(blocks[:, 8:], 16, 4) | (fields(blocks[:, 4:8], 1, 1) << 4)
    scale = halves(blocks, 0)
    return codes.view(np.int8) - np.int8(16), scale, halves(blocks, 2) + 16 * scale


def _decode_q8_0(blocks: Array) -> Decoded:
    return blocks[:, 2:].view(np.int8), halves(blocks, 0), None


def _decode_q1_0(blocks: Array) -> Decoded:
    """d, then a bit per weight: plus or minus d."""
    return 2 * fields(blocks[:, 2:], 1, 1).view(np.int8) - np.int8(1), halves(blocks, 0), None


def _decode_tq1_0(blocks: Array) -> Decoded:
    """Five codes of -1, 0, 1 to a byte (four in the last 4 bytes), as digits of base 3; d."""
    parts = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([3**i for i in range(digits)], np.uint8)[:, None]
        product = blocks[:, None, start:stop] * powers  # modulo 256, as stored
        codes = ((product.astype(np.uint16) * 3) >> 8).astype(np.int8)
        parts.append(codes.reshape(len(blocks), -1))
    return np.concatenate(parts, axis=-1) - np.int8(1), halves(blocks, 52), None


def _decode_tq2_0(blocks: Array) -> Decoded:
    return fields(blocks[:, :64], 32, 2).view(np.int8) - np.int8(1), halves(blocks, 64), None


def _decode_mxfp4(blocks: Array) -> Decoded:
    """A power of two, codes 16 into a table of twice the 4-bit floats."""
    table = np.array(quants.MXFP4.kvalues, np.int8)
    return table[fields(blocks[:, 1:], 16, 4)], _powers_of_two()[blocks[:, :1]], None


def _decode_nvfp4(blocks: Array) -> Decoded:
    """Four 8-bit floats, codes 32; blocks of 16."""
    table = np.array(quants.NVFP4.kvalues, np.int8)
    return table[fields(blocks[:, 4:], 8, 4)], _small_floats()[blocks[:, :4]], None


@cache
def _powers_of_two() -> Array:
    """Half of E8M0, by its byte: 2^(e - 128)."""
    return np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


@cache
def _small_floats() -> Array:
    """Half of unsigned E4M3, by its byte."""
    return np.asarray(quants.NVFP4.ue4m3_to_fp32(np.arange(256, dtype=np.uint8)), np.float32)


_INT4, _INT4_AFFINE = WeightFormat("int4", 32), WeightFormat("int4", 32, affine=True)
_INT8, _INT8_AFFINE = WeightFormat("int8", 32), WeightFormat("int8", 32, affine=True)
_INT8_16 = WeightFormat("int8", 16)

BLOCK_FORMATS: Mapping[GgmlType, BlockFormat] = {
    block.kind: block
    for block in (
        BlockFormat(GgmlType.F32, WeightFormat("float32")),
        BlockFormat(GgmlType.F16, WeightFormat("float16")),
        BlockFormat(GgmlType.BF16, WeightFormat("bfloat16")),
        BlockFormat(GgmlType.Q4_0, _INT4, _decode_q4_0),
        BlockFormat(GgmlType.Q4_1, _INT4_AFFINE, _decode_q4_1),
        BlockFormat(GgmlType.Q5_0, _INT8, _decode_q5_0),
        BlockFormat(GgmlType.Q5_1, _INT8_AFFINE, _decode_q5_1),
        BlockFormat(GgmlType.Q8_0, _INT8, _decode_q8_0),
        BlockFormat(GgmlType.Q2_K, WeightFormat("int4", 16, affine=True), kq.decode_q2_k),
        BlockFormat(GgmlType.Q3_K, WeightFormat("int4", 16), kq.decode_q3_k),
        BlockFormat(GgmlType.Q4_K, _INT4_AFFINE, kq.decode_q4_k),
        BlockFormat(GgmlType.Q5_K, _INT8_AFFINE, kq.decode_q5_k),
        BlockFormat(GgmlType.Q6_K, _INT8_16, kq.decode_q6_k),
        BlockFormat(GgmlType.IQ1_S, _INT8, iq.decode_iq1_s),
        BlockFormat(GgmlType.IQ1_M, _INT8_16, iq.decode_iq1_m),
        BlockFormat(GgmlType.IQ2_XXS, _INT8, iq.decode_iq2_xxs),
        BlockFormat(GgmlType.IQ2_XS, _INT8_16, iq.decode_iq2_xs),
        BlockFormat(GgmlType.IQ2_S, _INT8_16, iq.decode_iq2_s),
        BlockFormat(GgmlType.IQ3_XXS, _INT8, iq.decode_iq3_xxs),
        BlockFormat(GgmlType.IQ3_S, _INT8, iq.decode_iq3_s),
        BlockFormat(GgmlType.IQ4_NL, _INT8, iq.decode_iq4_nl),
        BlockFormat(GgmlType.IQ4_XS, _INT8, iq.decode_iq4_xs),
        BlockFormat(GgmlType.TQ1_0, WeightFormat("int4", 256), _decode_tq1_0),
        BlockFormat(GgmlType.TQ2_0, WeightFormat("int4", 256), _decode_tq2_0),
        BlockFormat(GgmlType.MXFP4, _INT8, _decode_mxfp4),
        BlockFormat(GgmlType.NVFP4, _INT8_16, _decode_nvfp4),
        BlockFormat(GgmlType.Q1_0, WeightFormat("int4", 128), _decode_q1_0),
    )
}
