"""GGUF's IQ formats: codes by index into a grid or a table, times a scale per 16 or 32 weights.

The grids come from the gguf package. Codes are integers of up to 7 bits and a sign in all of them.
Source of the layouts: ggml's block structures, and `gguf.quants`, against which they are tested.
Decoders take raw blocks uint8 [n, bytes]; see gguf_unpack.Decoded for what they return.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from gguf import quants

from ortolan.export.gguf_unpack import Array, Decoded, fields, halves, words


@cache
def _grid(owner: Any) -> Array:
    """The grid of one of the gguf package's formats, int8 [entries, 4 or 8]."""
    owner.init_grid()
    return np.asarray(owner.grid).reshape(owner.grid_shape).astype(np.int8)


def _signs(packed: Array) -> Array:
    """Bytes [...] -> eight signs each, lowest bit first, int8 [..., 8]; a 1 is minus."""
    bits = np.unpackbits(packed[..., None], axis=-1, bitorder="little")
    return np.int8(1) - 2 * bits.view(np.int8)


@cache
def _even_signs() -> Array:
    """Signs of eight weights by seven bits, the eighth making their number even: int8 [128, 8]."""
    return _signs(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8))


def _signs_and_scales(packed: Array) -> tuple[Array, Array]:
    """uint32 [n, 8] -> signs [n, 8, 4, 8] by four indices of 7 bits, and the top 4 bits + 0.5."""
    indices = (packed[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)) & 127
    scales = (packed >> np.uint32(28)).astype(np.float32) + np.float32(0.5)
    return _even_signs()[indices], scales


def _flat(codes: Array) -> Array:
    return codes.reshape(len(codes), -1)


def decode_iq2_xxs(blocks: Array) -> Decoded:
    """d, then for each 32 weights four indices and a word of signs and scale."""
    indices = blocks[:, 2:].reshape(-1, 8, 8)[..., :4]
    signs, scales = _signs_and_scales(words(blocks, 2, 66, "<u4")[:, 1::2])
    codes = _grid(quants.IQ2_XXS)[indices] * signs
    return _flat(codes), halves(blocks, 0) * scales * np.float32(0.25), None


def decode_iq2_xs(blocks: Array) -> Decoded:
    """d, indices of 9 bits with signs of 7 in 32 words, scales 8; blocks of 16."""
    packed = words(blocks, 2, 66, "<u2")
    codes = _grid(quants.IQ2_XS)[packed & 511] * _even_signs()[packed >> 9]
    return _flat(codes), _quarter_scales(blocks, 66), None


def decode_iq2_s(blocks: Array) -> Decoded:
    """d, indices 32, signs 32, two high bits of each index 8, scales 8; blocks of 16."""
    indices = blocks[:, 2:34] | (fields(blocks[:, 66:74], 1, 2).astype(np.uint16) << 8)
    codes = _grid(quants.IQ2_S)[indices] * _signs(blocks[:, 34:66])
    return _flat(codes), _quarter_scales(blocks, 74), None


def _quarter_scales(blocks: Array, at: int) -> Array:
    """d (s + 0.5) / 4 for 16 scales of 4 bits."""
    scales = fields(blocks[:, at : at + 8], 1, 4).astype(np.float32) + np.float32(0.5)
    quarters: Array = halves(blocks, 0) * scales * np.float32(0.25)
    return quarters


def decode_iq3_xxs(blocks: Array) -> Decoded:
    """d, indices 64, for each 32 weights a word of signs and scale."""
    signs, scales = _signs_and_scales(words(blocks, 66, 98, "<u4"))
    codes = _grid(quants.IQ3_XXS)[blocks[:, 2:66]].reshape(signs.shape) * signs
    return _flat(codes), halves(blocks, 0) * scales * np.float32(0.5), None


def decode_iq3_s(blocks: Array) -> Decoded:
    """d, indices 64, a high bit of each 8, signs 32, scales 4; w = d (1 + 2 s) q, blocks of 32."""
    indices = blocks[:, 2:66] | (fields(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8)
    signs = _signs(blocks[:, 74:106])
    codes = _grid(quants.IQ3_S)[indices].reshape(signs.shape) * signs
    return _flat(codes), halves(blocks, 0) * (1 + 2 * fields(blocks[:, 106:], 1, 4)), None


def decode_iq1_s(blocks: Array) -> Decoded:
    """d, indices 32, for each 32 weights a word of high bits, scale and shift; blocks of 32.

    w = d (2 s + 1) (g +- 1/8) with g in -1, 0, 1: codes are 8 g +- 1, the scale an eighth.
    """
    packed = words(blocks, 34, 50, "<u2")
    high = (packed[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7
    indices = blocks[:, 2:34] | (_flat(high) << 8)
    codes = _eighths(indices, np.repeat(packed >> 15, 4, axis=-1))
    return codes, halves(blocks, 0) * (2 * ((packed >> 12) & 7) + 1) * np.float32(0.125), None


def decode_iq1_m(blocks: Array) -> Decoded:
    """Indices 32, high bits and shifts 16, scales 8 with d in their top bits; blocks of 16."""
    packed = words(blocks, 48, 56, "<u2")
    tops = (packed & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    d = np.bitwise_or.reduce(tops, axis=-1, keepdims=True).view(np.float16).astype(np.float32)
    scales = _flat((packed[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7)
    high = fields(blocks[:, 32:48], 1, 4)
    codes = _eighths(blocks[:, :32] | ((high & 7).astype(np.uint16) << 8), high >> 3)
    return codes, d * (2 * scales + 1) * np.float32(0.125), None


def _eighths(indices: Array, minus: Array) -> Array:
    """8 g + 1, or 8 g - 1 where `minus` is 1, for each of eight weights by index."""
    shift = np.int8(1) - 2 * minus.astype(np.int8)
    return _flat(8 * _grid(quants.IQ1_S)[indices] + shift[..., None])


def decode_iq4_nl(blocks: Array) -> Decoded:
    """d, codes 16 into a table of 16 values; blocks of 32."""
    return _table()[fields(blocks[:, 2:], 16, 4)], halves(blocks, 0), None


def decode_iq4_xs(blocks: Array) -> Decoded:
    """d, high bits of scales 2, low bits 4, codes 128: w = d (s - 32) table[q], blocks of 32."""
    scales = fields(blocks[:, 4:8], 1, 4) | (fields(blocks[:, 2:4], 1, 2) << 4)
    scale = halves(blocks, 0) * (scales.view(np.int8) - np.int8(32))
    return _table()[fields(blocks[:, 8:], 16, 4)], scale, None


@cache
def _table() -> Array:
    return np.array(quants.IQ4_NL.kvalues, np.int8)
