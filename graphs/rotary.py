"""Rotary position tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ortolan.graphs.manifest import ModelConfig, RopeName

FloatArray = npt.NDArray[np.float32]


def rope_tables(rope: RopeName) -> tuple[str, str]:
    """Names of the cosine and sine table within the model."""
    prefix = "" if rope == "global" else f"{rope}_"
    return f"{prefix}cos_table", f"{prefix}sin_table"


def rotary_table(
    rotary_dim: int,
    max_len: int,
    theta: float,
    divisors: Sequence[float] | None = None,
    magnitude: float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Cosine and sine tables for rotary embedding.

    Returns two arrays [max_len, rotary_dim / 2], float32; angles are computed in float64.
    divisors: one for each frequency, as rope scaling asks for; magnitude multiplies the results.
    Source: Su et al. 2021, arXiv:2104.09864, eq. 34.
    """
    frequencies = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if divisors is not None:
        frequencies /= np.asarray(divisors, dtype=np.float64)
    angles = np.arange(max_len, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    return cos.astype(np.float32), sin.astype(np.float32)


def config_rotary_tables(
    config: ModelConfig, rope: RopeName, max_len: int
) -> tuple[FloatArray, FloatArray]:
    """That rope's tables for this model's first `max_len` positions."""
    dim = config.rotary_dim or config.head_dim
    if rope == "local":
        assert config.window_rope_theta is not None
        return rotary_table(dim, max_len, config.window_rope_theta)
    return rotary_table(
        dim, max_len, config.rope_theta, config.rope_divisors, config.rope_magnitude
    )
