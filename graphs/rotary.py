"""Rotary position tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def rotary_table(head_dim: int, max_len: int, theta: float) -> tuple[FloatArray, FloatArray]:
    """Cosine and sine tables for rotary embedding.

    Returns two arrays [max_len, head_dim / 2], float32; angles are computed in float64.
    Source: Su et al. 2021, arXiv:2104.09864, eq. 34.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(max_len, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
