"""Random GGUF blocks of every type, with scales that make weights of a sane size."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType

# Where a block has its half floats.
HALVES: dict[GgmlType, tuple[int, ...]] = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
    GgmlType.IQ1_S: (0,),
    GgmlType.IQ2_XXS: (0,),
    GgmlType.IQ2_XS: (0,),
    GgmlType.IQ2_S: (0,),
    GgmlType.IQ3_XXS: (0,),
    GgmlType.IQ3_S: (0,),
    GgmlType.IQ4_NL: (0,),
    GgmlType.IQ4_XS: (0,),
    GgmlType.TQ1_0: (52,),
    GgmlType.TQ2_0: (64,),
    GgmlType.Q1_0: (0,),
}


def random_bytes(kind: GgmlType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any bytes at all, uint8 [rows, bytes of a row]: some scales are infinite or NaN."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)


def random_rows(kind: GgmlType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random codes with scales such that the root mean square is about columns ** -0.5."""
    raw = random_bytes(kind, rows, columns, seed)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, size)
    _set_scales(kind, blocks, 2.0**-6, seed)
    if kind in HALVES and kind != GgmlType.Q1_0:
        found = gguf.quants.dequantize(raw, kind)
        _set_scales(kind, blocks, 2.0**-6 / np.sqrt(columns * np.mean(found**2)), seed)
    return raw


def _set_scales(kind: GgmlType, blocks: np.ndarray, size: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for at in HALVES.get(kind, ()):
        scales = size * rng.uniform(0.5, 1.5, len(blocks))
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    if kind == GgmlType.IQ1_M:  # the half float's nibbles are at the top of four words: 2^-8
        half = int(np.float16(2.0**-8).view(np.uint16))
        for i in range(4):
            blocks[:, 49 + 2 * i] &= 0x0F
            blocks[:, 49 + 2 * i] |= (half >> 4 * i & 15) << 4
    if kind == GgmlType.MXFP4:  # 2^(e - 128) times up to 12
        blocks[:, 0] = rng.integers(120, 124, len(blocks))
    if kind == GgmlType.NVFP4:  # 2^-10 times up to 15, times up to 12
        blocks[:, :4] = rng.integers(1, 16, (len(blocks), 4))
