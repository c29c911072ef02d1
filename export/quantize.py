"""Round-to-nearest: float weights to integer codes, with the scale that costs least in each block.

Plain rounding takes the scale from the block's largest number. Here several scales are tried, each
block keeps the one with the smallest squared error, and the scale (and offset) is then fitted to
the codes by least squares and the codes to the scale, twice. Plain rounding is among the
candidates, so the error is never larger than its. Some inputs may weigh more than others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ortolan.errors import CheckpointError
from ortolan.export.weights import Array, Weight
from ortolan.graphs.formats import WeightFormat

Floats = npt.NDArray[np.float32]

# Steps between zero and the block's extreme (symmetric), or between its ends (affine). Steps beyond
# the codes' own clip the ends. Those below are for weights that lie on a grid already: with 5 to 8
# (8 to 15), or a multiple of a smaller number, each grid of 4-bit codes is found again.
_SYMMETRIC_STEPS = {4: (7, 8, 5, 6, 6.5, 7.5, 8.5, 9, 9.5), 8: (127, 128, 120, 124, 126)}
_AFFINE_STEPS = {4: (15, 8, 9, 10, 11, 12, 13, 14, 15.5, 16, 17), 8: (255, 240, 250, 256, 258)}
_REFINEMENTS = 2
_CHUNK = 1 << 18  # elements at a time: what is computed stays in the processor's cache


def quantize(weight: Weight, fmt: WeightFormat) -> Weight:
    """The matrix in int4 or int8 blocks; the last block of a row may be shorter than the others.

    Reads and rounds some rows at a time: besides the result it holds a few megabytes, however
    large the matrix. Raises CheckpointError if an element is not finite.
    """
    rows, columns = weight.codes.shape
    if fmt.w8a8:  # a row is one block
        return replace(quantize(weight, WeightFormat(fmt.dtype, columns)), format=fmt)
    blocks = fmt.num_blocks(columns)
    codes: Array = np.empty((rows, columns), np.int8)
    scale: Floats = np.empty((rows, blocks), np.float32)
    offset: Floats = np.empty((rows, blocks if fmt.affine else 0), np.float32)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = weight.rows(start, start + step).dequantized()
        codes[part], scale[part], found = fit_blocks(values, fmt)
        if fmt.affine:
            offset[part] = found
    return Weight(fmt, codes, scale, offset if fmt.affine else None)


def fit_blocks(
    values: Floats, fmt: WeightFormat, importance: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """Codes [rows, K], scales and offsets [rows, blocks] of some rows [rows, K].

    importance: what a squared error in each of the K inputs weighs; None stands for all alike.
    Raises CheckpointError if an element is not finite.
    """
    if not np.isfinite(values).all():
        raise CheckpointError(
            "a weight holds numbers that are not finite and cannot be rounded; fetch the file again"
        )
    rows, columns = values.shape
    whole = columns // fmt.block_size * fmt.block_size
    found = []
    # The whole blocks of a row, then what is left over as a block of its own length.
    for first, last, size in ((0, whole, fmt.block_size), (whole, columns, columns - whole)):
        if first < last:
            blocks = values[:, first:last].reshape(rows, -1, size)
            weights = None if importance is None else _weights(importance[first:last], size)
            found.append(_fit(blocks, weights, fmt))
    codes = np.concatenate([part[0].reshape(rows, -1) for part in found], axis=1)
    scale, offset = (np.concatenate([part[i] for part in found], axis=1) for i in (1, 2))
    return codes, scale, offset


def _fit(x: Floats, weights: Floats | None, fmt: WeightFormat) -> tuple[Floats, Floats, Floats]:
    """Codes [n, blocks, size], scales and offsets [n, blocks] of x [n, blocks, size].

    weights: what a squared error weighs, [blocks, size], 1 on average.
    """
    unit: Floats
    if not fmt.affine:
        # In units in which the extreme is -1: signed codes reach one step further down than up.
        largest = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
        unit = np.where(largest == 0, np.float32(1), -largest)
        codes, scale = _fit_symmetric(np.divide(x, unit, dtype=np.float32), weights, fmt.bits)
        scale = _bounded(scale * unit[..., 0], codes)
        return codes, scale, np.zeros_like(scale)
    # Halves, since the distance of two float32 may not be one.
    low, high = x.min(-1, keepdims=True) / 2, x.max(-1, keepdims=True) / 2
    constant = high == low
    unit = np.where(constant, np.float32(1), high - low)
    y = np.divide(x / 2 - low, unit, dtype=np.float32)
    codes, scale, minimum = _fit_affine(y, weights, fmt.bits)
    # w = s q + m = s (q - middle) + (m + middle s): signed codes, and an offset.
    middle = np.float32(1 << (fmt.bits - 1))
    codes -= middle
    scale = np.where(constant, np.float32(0), scale[..., None] * unit)[..., 0]
    scale = _bounded(scale, codes * 2) * 2
    offset = (minimum * unit[..., 0] + low[..., 0]) * 2 + middle * scale
    return codes, scale, offset


def _weights(importance: Floats, size: int) -> Floats:
    """Importances of whole blocks as [blocks, size], in each block 1 on average."""
    blocks = importance.reshape(-1, size).astype(np.float64)
    mean = blocks.mean(-1, keepdims=True)
    return np.where(mean > 0, blocks / np.where(mean > 0, mean, 1), 1).astype(np.float32)


def _dot(a: Floats, b: Floats, weights: Floats | None) -> Floats:
    """Sums of products over the last dimension, weighted if there are weights."""
    return np.asarray(np.einsum("...i,...i", a if weights is None else a * weights, b))


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Their ratio, 0 where the denominator is (both are then)."""
    return np.asarray(numerator / np.where(denominator == 0, 1, denominator), np.float32)


def _mean(x: Floats, weights: Floats | None) -> Floats:
    """Means over the last dimension; the weights' own mean is 1."""
    return np.asarray((x if weights is None else x * weights).mean(-1))


def _bounded(scale: Floats, codes: Floats) -> Floats:
    """Scales that keep their codes' values finite, be it at the ends of what float32 holds."""
    limit = np.float32(3.4028e38) / np.maximum(np.abs(codes).max(-1), 1)
    return np.clip(scale, -limit, limit)


def _fit_symmetric(y: Floats, weights: Floats | None, bits: int) -> tuple[Floats, Floats]:
    """Signed codes and scales of y, whose extremes are -1."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    best = _Best(y, weights)
    for steps in _SYMMETRIC_STEPS[bits]:
        codes = np.clip(np.rint(y * np.float32(steps)), low, high)
        best.offer(codes, np.full(y.shape[:-1], 1 / steps, np.float32), None)
    for _ in range(_REFINEMENTS):
        codes = best.codes
        squares = _dot(codes, codes, weights)
        scale = _ratio(_dot(codes, y, weights), squares)
        inverse = 1 / np.where(scale == 0, np.float32(1), scale)
        best.offer(codes, scale, None)
        best.offer(np.clip(np.rint(y * inverse[..., None]), low, high), scale, None)
    return best.codes, best.scale


def _fit_affine(y: Floats, weights: Floats | None, bits: int) -> tuple[Floats, Floats, Floats]:
    """Codes from 0 on, scales and minima of y, whose ends are 0 and 1."""
    high = (1 << bits) - 1
    best = _Best(y, weights)
    for steps in _AFFINE_STEPS[bits]:
        # What lies outside of the codes' reach is cut off at both ends alike.
        outside = max(0.0, 1 - high / steps) / 2
        codes = np.clip(np.rint((y - np.float32(outside)) * np.float32(steps)), 0, high)
        shape = y.shape[:-1]
        best.offer(
            codes, np.full(shape, 1 / steps, np.float32), np.full(shape, outside, np.float32)
        )
    for _ in range(_REFINEMENTS):
        codes = best.codes
        mean_code, mean_y = _mean(codes, weights), _mean(y, weights)
        spread = codes - mean_code[..., None]
        squares = _dot(spread, spread, weights)
        scale = _ratio(_dot(spread, y, weights), squares)
        minimum = np.asarray(mean_y - scale * mean_code, np.float32)
        inverse = 1 / np.where(scale == 0, np.float32(1), scale)
        best.offer(codes, scale, minimum)
        again = np.rint((y - minimum[..., None]) * inverse[..., None])
        best.offer(np.clip(again, 0, high), scale, minimum)
    return best.codes, best.scale, best.minimum


class _Best:
    """For each block of y, the candidate with the smallest squared error so far."""

    def __init__(self, y: Floats, weights: Floats | None) -> None:
        self._y = y
        self._weights = weights
        self._error = np.full(y.shape[:-1], np.inf, np.float32)
        self.codes = np.zeros_like(y)
        self.scale = np.zeros(y.shape[:-1], np.float32)
        self.minimum = np.zeros(y.shape[:-1], np.float32)

    def offer(self, codes: Floats, scale: Floats, minimum: Floats | None) -> None:
        difference = codes * scale[..., None]
        difference -= self._y
        if minimum is not None:
            difference += minimum[..., None]
        error = _dot(difference, difference, self._weights)
        better = error < self._error
        np.copyto(self._error, error, where=better)
        np.copyto(self.codes, codes, where=better[..., None])
        np.copyto(self.scale, scale, where=better)
        if minimum is not None:
            np.copyto(self.minimum, minimum, where=better)
