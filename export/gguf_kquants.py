"""GGUF's K-quants: super-blocks of 256 weights, whose scales are integers times one half float.

Source of the layouts: ggml's block structures, and `gguf.quants`, against which they are tested.
Decoders take raw blocks uint8 [n, bytes]; see gguf_unpack.Decoded for what they return.
"""

from __future__ import annotations

import numpy as np

from ortolan.export.gguf_unpack import Array, Decoded, fields, halves


def decode_q2_k(blocks: Array) -> Decoded:
    """Scales and minimums 16, codes 64, d, dmin: w = d s q - dmin m, blocks of 16.

    As everywhere, w = d s (q - c) + (c d s - dmin m), with c in the middle of the codes.
    """
    packed = blocks[:, :16]
    scale = halves(blocks, 80) * (packed & 15)
    codes = fields(blocks[:, 16:80], 32, 2).view(np.int8) - np.int8(2)
    return codes, scale, 2 * scale - halves(blocks, 82) * (packed >> 4)


def decode_q3_k(blocks: Array) -> Decoded:
    """High bits 32, low bits 64, scales 12, d: w = d (s - 32) (q - 4), blocks of 16."""
    low, high = fields(blocks[:, 32:96], 32, 2), fields(blocks[:, :32], 32, 1)
    codes = (low | (high << 2)).view(np.int8) - np.int8(4)
    scales = fields(blocks[:, 96:104], 8, 4) | (fields(blocks[:, 104:108], 4, 2) << 4)
    return codes, halves(blocks, 108) * (scales.view(np.int8) - np.int8(32)), None


def decode_q4_k(blocks: Array) -> Decoded:
    """d, dmin, scales and minimums 12, codes 128: w = d s q - dmin m, blocks of 32."""
    scale, minimum = _scales_and_minimums(blocks)
    codes = fields(blocks[:, 16:], 32, 4).view(np.int8) - np.int8(8)
    return codes, scale, 8 * scale - minimum


def decode_q5_k(blocks: Array) -> Decoded:
    """As Q4_K, with 32 bytes of high bits before the codes."""
    scale, minimum = _scales_and_minimums(blocks)
    codes = fields(blocks[:, 48:], 32, 4) | (fields(blocks[:, 16:48], 32, 1) << 4)
    return codes.view(np.int8) - np.int8(16), scale, 16 * scale - minimum


def decode_q6_k(blocks: Array) -> Decoded:
    """Low bits 128, high bits 64, scales 16, d: w = d s (q - 32), blocks of 16."""
    low, high = fields(blocks[:, :128], 64, 4), fields(blocks[:, 128:192], 32, 2)
    codes = (low | (high << 4)).view(np.int8) - np.int8(32)
    return codes, halves(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _scales_and_minimums(blocks: Array) -> tuple[Array, Array]:
    """d s and dmin m of Q4_K and Q5_K, whose 6-bit s and m share 12 bytes; [n, 8]."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    return halves(blocks, 0) * scales, halves(blocks, 2) * minimums
