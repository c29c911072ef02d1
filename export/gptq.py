"""Rounding that minimises the error of a linear layer's output, given its inputs' moments.

The error of row w rounded to v is (w - v) H (w - v)^T, where H sums x x^T over the inputs x.
Columns are rounded one after another, those with the strongest inputs first; what each loses, the
columns after it make up for. Scales are found beforehand, with a column's error weighing what it
costs when the others after it make up for it as well as they can. Then scales are fitted to the
codes and codes to the scales, in turns.

Sources: Frantar et al. 2022, arXiv:2210.17323 (GPTQ); Behdin et al. 2023, arXiv:2309.01885
(QuantEase: one column after another, given all the others).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortolan.export.quantize import Floats, fit_blocks
from ortolan.export.weights import Weight, stack_rows
from ortolan.graphs.formats import WeightFormat

Doubles = npt.NDArray[np.float64]

DAMPING = 0.01  # of the mean of H's diagonal, added to the diagonal
_GROUP = 128  # columns whose errors reach the ones behind them together
_ELEMENTS = 1 << 22  # of a matrix that are rounded together
_ROWS = 256  # rows whose scales are fitted together
_LEAF = 128  # size from which a triangle is inverted in halves


@dataclass(frozen=True)
class Moments:
    """H of a linear layer's inputs, and what rounding needs of it.

    damped: H with something added to its diagonal, [K, K]. order: columns, the strongest first.
    factor: upper triangle U with inverse(damped[order, order]) = U^T U.
    """

    damped: Floats
    order: npt.NDArray[np.int64]
    factor: Floats

    @classmethod
    def of(cls, moments: Floats) -> Moments:
        """Of the sum of x x^T over all inputs x, [K, K]."""
        damped = moments.astype(np.float64)
        diagonal = damped.diagonal()
        # Channels that were never seen have nothing but this.
        damping = DAMPING * diagonal.mean()
        damped[np.diag_indices(len(damped))] += damping if damping > 0 else 1.0
        order = np.argsort(-damped.diagonal(), kind="stable")
        # Reversed, the lower triangle of Cholesky is an upper one: H = T T^T, inverse(T) = U.
        backwards = order[::-1]
        lower = np.linalg.cholesky(damped[np.ix_(backwards, backwards)])
        triangle: Doubles = np.asarray(lower[::-1, ::-1], np.float64)
        factor = _inverse_of_upper(triangle).astype(np.float32)
        return cls(damped.astype(np.float32), order, factor)

    def divided(self, scale: Floats) -> Moments:
        """Of x / scale, a positive number for each channel; the order stays."""
        damped = self.damped / scale / scale[:, None]
        return Moments(damped, self.order, self.factor * scale[self.order])

    def corrected(self, values: Floats, cross: Floats, moments: Floats, share: float) -> Floats:
        """Weights [N, K] whose outputs for these inputs are nearer to those wanted of others.

        The inputs x of a layer behind rounded ones are not the x' of the exact model. Outputs
        W x' are best had from x by W C inverse(H), where C (`cross`) sums x' x^T and H (`moments`)
        x x^T; this goes a share of the way there.
        """
        difference = (cross - moments)[:, self.order]
        product = np.empty_like(difference)
        product[:, self.order] = (difference @ self.factor.T) @ self.factor
        return np.asarray(values + np.float32(share) * (values @ product), np.float32)

    @property
    def importance(self) -> Floats:
        """What an error in each column costs when those after it make up for it, [K]."""
        found = np.empty(len(self.order), np.float32)
        found[self.order] = 1 / np.square(self.factor.diagonal())
        return found

    def error(self, difference: Floats) -> float:
        """What rounding costs, given w - v [N, K]: summed over rows, the damping included."""
        return float(np.einsum("nk,nk->", difference @ self.damped, difference))


def gptq(values: Floats, moments: Moments, fmt: WeightFormat, refinements: int = 1) -> Weight:
    """The matrix [N, K] in blocks, rounded for these inputs.

    refinements: how often scales and codes are fitted to each other afterwards.
    Raises CheckpointError if an element is not finite.
    """
    # Rows do not depend on each other: those of a large table are rounded some at a time.
    step = max(1, _ELEMENTS // values.shape[1])
    slabs = [
        _rounded_rows(values[start : start + step], moments, fmt, refinements)
        for start in range(0, len(values), step)
    ]
    return stack_rows(slabs)


def _rounded_rows(values: Floats, moments: Moments, fmt: WeightFormat, refinements: int) -> Weight:
    _, scale, offset = fit_blocks(values, fmt, moments.importance)
    codes = _rounded(values, moments, fmt, scale, offset)
    for _ in range(refinements):
        scale, offset = _fitted(values, moments, fmt, codes, scale, offset)
        codes = _descended(values, moments, fmt, codes, scale, offset)
    return Weight(fmt, codes.astype(np.int8), scale, offset if fmt.affine else None)


def nearest(values: Floats, fmt: WeightFormat, importance: Floats | None = None) -> Weight:
    """The matrix in blocks, each element rounded for itself."""
    step = max(1, _ELEMENTS // values.shape[1])
    slabs = []
    for start in range(0, len(values), step):
        codes, scale, offset = fit_blocks(values[start : start + step], fmt, importance)
        slabs.append(Weight(fmt, codes.astype(np.int8), scale, offset if fmt.affine else None))
    return stack_rows(slabs)


def _inverse_of_upper(triangle: Doubles) -> Doubles:
    """By halves, so that nearly all of it is matrix products."""
    size = len(triangle)
    if size <= _LEAF:
        return np.asarray(np.linalg.inv(triangle))
    half = size // 2
    first = _inverse_of_upper(triangle[:half, :half])
    second = _inverse_of_upper(triangle[half:, half:])
    whole = np.zeros_like(triangle)
    whole[:half, :half], whole[half:, half:] = first, second
    whole[:half, half:] = -first @ (triangle[:half, half:] @ second)
    return whole


def _per_column(blocks: Floats, fmt: WeightFormat, columns: int) -> Floats:
    """Numbers of blocks [N, blocks] repeated for each column, transposed: [K, N]."""
    return np.repeat(blocks.T, fmt.block_size, axis=0)[:columns]


def _limits(fmt: WeightFormat) -> tuple[int, int]:
    return -(1 << (fmt.bits - 1)), (1 << (fmt.bits - 1)) - 1


def _rounded(
    values: Floats, moments: Moments, fmt: WeightFormat, scale: Floats, offset: Floats
) -> Floats:
    """Codes [N, K] by GPTQ, with the given scales and offsets."""
    columns, (low, high), order = values.shape[1], _limits(fmt), moments.order
    factor = moments.factor
    # Columns become rows, in the order in which they are rounded: what is changed lies together.
    left = values.T[order]
    scales = _per_column(scale, fmt, columns)[order]
    offsets = _per_column(offset, fmt, columns)[order]
    divisors = np.where(scales == 0, np.float32(1), scales)
    codes = np.empty_like(left)
    for start in range(0, columns, _GROUP):
        stop = min(start + _GROUP, columns)
        errors = np.empty((stop - start, len(values)), np.float32)
        for j in range(start, stop):
            codes[j] = np.clip(np.rint((left[j] - offsets[j]) / divisors[j]), low, high)
            error = (left[j] - codes[j] * scales[j] - offsets[j]) / factor[j, j]
            left[j + 1 : stop] -= factor[j, j + 1 : stop, None] * error
            errors[j - start] = error
        left[stop:] -= factor[start:stop, stop:].T @ errors
    found = np.empty_like(codes)
    found[order] = codes
    return np.ascontiguousarray(found.T)


def _descended(
    values: Floats,
    moments: Moments,
    fmt: WeightFormat,
    codes: Floats,
    scale: Floats,
    offset: Floats,
) -> Floats:
    """Codes of which each, column after column, is the best given all the others."""
    columns, (low, high), damped = values.shape[1], _limits(fmt), moments.damped
    scales, offsets = _per_column(scale, fmt, columns), _per_column(offset, fmt, columns)
    divisors = np.where(scales == 0, np.float32(1), scales)
    found = codes.T.copy()
    # The gradient of the error by each element, halved: [K, N].
    slope = damped @ (values.T - found * scales - offsets)
    for start in range(0, columns, _GROUP):
        stop = min(start + _GROUP, columns)
        steps = np.empty((stop - start, len(values)), np.float32)
        for j in range(start, stop):
            best = np.rint(found[j] + slope[j] / (damped[j, j] * divisors[j]))
            best = np.clip(best, low, high)
            step = (best - found[j]) * scales[j]
            slope[start:stop] -= damped[start:stop, j, None] * step
            found[j], steps[j - start] = best, step
        slope[stop:] -= damped[stop:, start:stop] @ steps
    return np.ascontiguousarray(found.T)


def _fitted(
    values: Floats,
    moments: Moments,
    fmt: WeightFormat,
    codes: Floats,
    scale: Floats,
    offset: Floats,
) -> tuple[Floats, Floats]:
    """The scales and offsets that are best for these codes, by least squares, row by row."""
    new_scale, new_offset = np.empty_like(scale), offset.copy()
    for start in range(0, len(values), _ROWS):
        part = slice(start, start + _ROWS)
        found = _solved(values[part], moments.damped, fmt, codes[part])
        usable = np.isfinite(found).all(-1, keepdims=True)
        blocks = scale.shape[1]
        new_scale[part] = np.where(usable, found[:, :blocks], scale[part])
        if fmt.affine:
            new_offset[part] = np.where(usable, found[:, blocks:], offset[part])
    return new_scale, new_offset


def _solved(values: Floats, damped: Floats, fmt: WeightFormat, codes: Floats) -> Floats:
    """Factors of each row's parts that sum up best to it: [N, parts].

    A part is a block's codes or, with offsets, a block of ones as well.
    """
    rows, columns = values.shape
    blocks = [
        slice(start, min(start + fmt.block_size, columns))
        for start in range(0, columns, fmt.block_size)
    ]
    parts = [(block, codes[:, block]) for block in blocks]
    if fmt.affine:
        parts += [(block, np.ones((1, block.stop - block.start), np.float32)) for block in blocks]
    wanted = values @ damped
    products = np.empty((rows, len(parts), len(parts)))
    targets = np.empty((rows, len(parts)))
    for i, (block, part) in enumerate(parts):
        targets[:, i] = (wanted[:, block] * part).sum(-1)
        reach = part @ damped[block]
        for j, (other, also) in enumerate(parts[: i + 1]):
            products[:, i, j] = products[:, j, i] = (reach[:, other] * also).sum(-1)
    # Blocks of nothing but zeros have no scale of their own.
    diagonal = np.einsum("nii->ni", products)  # a view
    diagonal += np.where(diagonal > 0, 1e-7 * diagonal, 1.0)
    return np.linalg.solve(products, targets[..., None])[..., 0].astype(np.float32)
