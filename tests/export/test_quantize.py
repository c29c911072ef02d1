"""Rounding to codes: never worse than plain rounding, and right where weights are not ordinary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ortolan.errors import CheckpointError
from ortolan.export.quantize import quantize
from ortolan.export.weights import Weight
from ortolan.graphs.formats import WeightFormat

FORMATS = [
    WeightFormat(dtype, block_size, affine)
    for dtype, block_size, affine in itertools.product(
        ("int4", "int8"), (16, 32, 256), (False, True)
    )
]


def floats(values: np.ndarray) -> Weight:
    return Weight(WeightFormat("float32"), np.asarray(values, np.float32))


def squared_errors(values: np.ndarray, fmt: WeightFormat) -> np.ndarray:
    """Of each block, [rows, blocks]."""
    difference = quantize(floats(values), fmt).dequantized().astype(np.float64) - values
    return by_block(difference, fmt.block_size, lambda part: (part**2).sum(-1))


def by_block(values: np.ndarray, size: int, function) -> np.ndarray:
    parts = [values[:, start : start + size] for start in range(0, values.shape[1], size)]
    return np.stack([function(part) for part in parts], axis=1)


def plain_errors(values: np.ndarray, fmt: WeightFormat) -> np.ndarray:
    """Of round-to-nearest with the scale that the block's extremes give, worked out apart."""

    def of_block(part: np.ndarray) -> np.ndarray:
        part = part.astype(np.float64)
        if fmt.affine:
            low, high = part.min(-1, keepdims=True), part.max(-1, keepdims=True)
            scale = (high - low) / (2**fmt.bits - 1)
        else:
            low, scale = 0.0, np.abs(part).max(-1, keepdims=True) / (2 ** (fmt.bits - 1) - 1)
        rounded = np.rint((part - low) / np.where(scale == 0, 1, scale)) * scale + low
        return ((rounded - part) ** 2).sum(-1)

    return by_block(values, fmt.block_size, of_block)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("columns", [512, 300, 7])
def test_no_block_is_worse_than_by_plain_rounding(fmt: WeightFormat, columns: int) -> None:
    """The search must only ever help, in the last, shorter block too."""
    rng = np.random.default_rng(columns)
    values = (rng.standard_normal((40, columns)) ** 3).astype(np.float32)
    ours, plain = squared_errors(values, fmt), plain_errors(values, fmt)
    assert ours.shape == plain.shape
    assert (ours <= plain * (1 + 1e-4)).all()
    if fmt.bits == 4:
        assert ours.mean() < 0.95 * plain.mean()


def best_by_brute_force(block: np.ndarray) -> float:
    """The smallest squared error of any scale for symmetric 4-bit codes, on a fine grid."""
    scales = np.linspace(-1, 1, 40001)[:, None] * np.abs(block).max() / 4
    codes = np.clip(np.rint(block / np.where(scales == 0, 1, scales)), -8, 7)
    return float(((codes * scales - block) ** 2).sum(-1).min())


def test_scale_is_near_the_best_that_there_is() -> None:
    """A few candidates stand for all scales: on average within 6 % of the best possible error."""
    blocks = np.random.default_rng(0).standard_normal((100, 16)).astype(np.float32)
    ours = squared_errors(blocks, WeightFormat("int4", 16))[:, 0]
    best = np.array([best_by_brute_force(block) for block in blocks])
    assert (ours >= best * 0.999).all()
    assert ours.mean() <= 1.06 * best.mean()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("levels", [3, 4, 8, 13, 16])
def test_four_bit_grids_are_found_again(affine: bool, levels: int) -> None:
    """Weights that are codes times a scale already (a ternary model) must not lose anything."""
    rng = np.random.default_rng(levels)
    codes = rng.integers(0, levels, (50, 64)) - levels // 2
    offset = rng.standard_normal((50, 1)) if affine else 0.0
    values = (codes * rng.uniform(0.01, 3, (50, 1)) + offset).astype(np.float32)
    found = quantize(floats(values), WeightFormat("int4", 32, affine)).dequantized()
    assert np.abs(found - values).max() <= 2e-6 * np.abs(values).max()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38, 1e-45])
def test_constant_blocks_come_back(fmt: WeightFormat, value: float) -> None:
    """A block of zeros has no scale, and one of the largest floats must not overflow on the way."""
    found = quantize(floats(np.full((2, 40), value)), fmt).dequantized()
    assert np.isfinite(found).all()
    assert np.allclose(found, np.float32(value), rtol=1e-5, atol=1e-44)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_outlier_costs_no_more_than_it_must(fmt: WeightFormat) -> None:
    """One huge weight takes its whole block's digits; it must survive, and spoil no other block."""
    values = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    values[1, 3] = 1e30
    weight = quantize(floats(values), fmt)
    assert weight.dequantized()[1, 3] == pytest.approx(1e30, rel=0.01)
    elsewhere = np.ones((4, 512), bool)
    elsewhere[1, : fmt.block_size] = False
    assert np.abs(weight.dequantized() - values)[elsewhere].max() < 1


def test_ends_of_the_float_range_in_one_block() -> None:
    """Their distance is no float32 any more."""
    values = np.linspace(-3.4e38, 3.4e38, 32, dtype=np.float32)[None]
    for fmt in FORMATS:
        found = quantize(floats(values), fmt).dequantized()
        assert np.abs(found / 3.4e38 - values / 3.4e38).max() < 0.13


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", FORMATS[:2], ids=str)
def test_what_is_not_finite_is_refused(fmt: WeightFormat, bad: float) -> None:
    """It would become an ordinary number, and the model quietly another one."""
    values = np.ones((3, 64), np.float32)
    values[2, 63] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        quantize(floats(values), fmt)


def test_large_matrix_is_rounded_row_by_row_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows are taken at a time must not show in the result."""
    values = np.random.default_rng(0).standard_normal((33, 100)).astype(np.float32)
    fmt = WeightFormat("int4", 32, affine=True)
    whole = quantize(floats(values), fmt)
    monkeypatch.setattr("ortolan.export.quantize._CHUNK", 250)
    pieces = quantize(floats(values), fmt)
    assert np.array_equal(whole.codes, pieces.codes)
    assert np.array_equal(whole.scale, pieces.scale)
    assert np.array_equal(whole.offset, pieces.offset)


def test_sixteen_bit_and_quantized_sources() -> None:
    """Both are read a few rows at a time, and round as their float32 values do."""
    values = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float16)
    fmt, other = WeightFormat("int4", 16), WeightFormat("int8", 32)
    half = quantize(Weight(WeightFormat("float16"), values), fmt)
    assert np.array_equal(half.codes, quantize(floats(values), fmt).codes)
    blocked = quantize(floats(values), other)
    twice = quantize(blocked, fmt)
    assert np.array_equal(twice.codes, quantize(floats(blocked.dequantized()), fmt).codes)
