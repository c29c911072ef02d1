"""Rounding for the output's sake: never worse than each weight for itself, and by how much."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ortolan.errors import CheckpointError
from ortolan.export.gptq import Moments, gptq, nearest
from ortolan.graphs.formats import WeightFormat

FORMATS = [
    WeightFormat(dtype, block_size, affine)
    for dtype, block_size, affine in itertools.product(("int4", "int8"), (32, 128), (False, True))
]


def inputs(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Inputs as layers have them: channels that depend on each other, a few of them strong."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((rows, columns // 4)) @ rng.standard_normal((columns // 4, columns))
    strengths = np.exp(rng.standard_normal(columns))
    return ((mixed + rng.standard_normal((rows, columns))) * strengths).astype(np.float32)


def weights(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def output_error(x: np.ndarray, values: np.ndarray, rounded: np.ndarray) -> float:
    """Worked out from the inputs themselves, not from their moments."""
    return float(((x.astype(np.float64) @ (rounded.astype(np.float64) - values).T) ** 2).sum())


@pytest.mark.parametrize("columns", [256, 300])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_outputs_are_nearer_than_by_rounding_each_weight_for_itself(
    fmt: WeightFormat, columns: int
) -> None:
    """That is all it is for; the last, shorter block counts too."""
    x, values = inputs(2000, columns), weights(40, columns)
    moments = Moments.of(x.T @ x)
    plain = output_error(x, values, nearest(values, fmt).dequantized())
    once = output_error(x, values, gptq(values, moments, fmt, 0).dequantized())
    refined = output_error(x, values, gptq(values, moments, fmt, 2).dequantized())
    assert once < 0.5 * plain
    assert refined < once


def test_nothing_is_within_one_step_of_a_better_code() -> None:
    """The last descent ends where no single code can be changed for the better, or nearly so."""
    fmt, x, values = WeightFormat("int4", 32), inputs(500, 64), weights(6, 64)
    moments = Moments.of(x.T @ x)
    found = gptq(values, moments, fmt, 12)
    assert found.scale is not None
    best = moments.error(values - found.dequantized())
    better = 0
    for row, column, step in itertools.product(range(6), range(64), (-1, 1)):
        changed = found.dequantized()
        code = int(found.codes[row, column]) + step
        if -8 <= code <= 7:
            changed[row, column] += step * found.scale[row, column // 32]
            better += moments.error(values - changed) < best * (1 - 1e-4)
    assert better <= 4


def test_error_is_that_of_the_outputs() -> None:
    """Methods are chosen between by it."""
    x, values = inputs(500, 64), weights(5, 64)
    rounded = nearest(values, WeightFormat("int4", 32)).dequantized()
    found = Moments.of(x.T @ x).error(values - rounded)
    assert found == pytest.approx(output_error(x, values, rounded), rel=0.05)


def test_scaled_inputs_need_no_new_factor() -> None:
    """Scales are tried by the dozen; each would cost a Cholesky decomposition otherwise."""
    x, scale = inputs(800, 96), np.linspace(0.5, 2, 96, dtype=np.float32)
    divided = Moments.of(x.T @ x).divided(scale)
    order = divided.order
    inverse = np.linalg.inv(divided.damped[np.ix_(order, order)].astype(np.float64))
    assert np.allclose(divided.factor.T @ divided.factor, inverse, rtol=2e-3, atol=1e-9)


@pytest.mark.parametrize("size", [1, 127, 300])
def test_factor_is_of_the_inverse(size: int) -> None:
    """Errors go to the columns behind in these proportions; halves must be put together right."""
    x = inputs(3 * size + 8, max(4, size))
    moments = Moments.of(x.T @ x)
    factor, order = moments.factor.astype(np.float64), moments.order
    assert np.array_equal(factor, np.triu(factor))
    product = factor.T @ factor @ moments.damped[np.ix_(order, order)]
    assert np.allclose(product, np.eye(len(factor)), atol=2e-3)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_channels_that_are_never_seen_are_rounded_like_others(fmt: WeightFormat) -> None:
    """A user's text may meet them; with no inputs at all, each weight is rounded for itself."""
    values = weights(8, 256)
    unseen = gptq(values, Moments.of(np.zeros((256, 256), np.float32)), fmt).dequantized()
    plain = nearest(values, fmt).dequantized()
    assert ((unseen - values) ** 2).sum() <= 1.05 * ((plain - values) ** 2).sum()
    x = inputs(600, 256)
    x[:, 10:40] = 0
    partly = gptq(values, Moments.of(x.T @ x), fmt).dequantized()
    steps = np.abs(values).max() * (0.15 if fmt.bits == 4 else 0.01)
    assert np.abs(partly - values)[:, 10:40].max() < 3 * steps


def test_fewer_inputs_than_channels_are_enough_to_go_on() -> None:
    """Moments of a short text have no inverse; what is added to their diagonal gives them one."""
    x, values = inputs(20, 256), weights(8, 256)
    fmt = WeightFormat("int4", 64)
    found = gptq(values, Moments.of(x.T @ x), fmt).dequantized()
    assert np.isfinite(found).all()
    assert output_error(x, values, found) < output_error(
        x, values, nearest(values, fmt).dequantized()
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_zeros_stay_zeros(fmt: WeightFormat) -> None:
    """A pruned row or block has no scale; dividing by it would spoil the whole matrix."""
    x, values = inputs(300, 256), weights(4, 256)
    values[1] = 0
    values[2, :128] = 0
    found = gptq(values, Moments.of(x.T @ x), fmt).dequantized()
    assert np.isfinite(found).all()
    assert np.abs(found[1]).max() < 1e-6


def test_what_is_not_finite_is_refused() -> None:
    """It would spread over its whole row."""
    values = weights(2, 64)
    values[1, 3] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        gptq(values, Moments.of(np.eye(64, dtype=np.float32)), WeightFormat("int4", 32))


@pytest.mark.parametrize("refinements", [0, 1])
def test_how_columns_are_grouped_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, refinements: int
) -> None:
    """Groups only save time: what one column loses reaches all others, near and far."""
    x, values, fmt = inputs(800, 192), weights(20, 192), WeightFormat("int4", 32)
    moments = Moments.of(x.T @ x)
    errors = []
    for size in (16, 64, 192):
        monkeypatch.setattr("ortolan.export.gptq._GROUP", size)
        rounded = gptq(values, moments, fmt, refinements).dequantized()
        errors.append(moments.error(values - rounded))
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-3)


def test_corrected_weights_give_from_what_is_read_what_was_wanted() -> None:
    """What rounded layers before have changed is made up for; no change, no correction."""
    x, values = inputs(2000, 96), weights(12, 96)
    rng = np.random.default_rng(2)
    turned = np.eye(96) + 0.05 * rng.standard_normal((96, 96))
    exact = (x @ turned).astype(np.float32)
    moments, cross = x.T @ x, exact.T @ x
    found = Moments.of(moments)

    def error(corrected: np.ndarray) -> float:
        return float(np.square(x @ corrected.T - exact @ values.T).sum())

    errors = [error(found.corrected(values, cross, moments, share)) for share in (0, 0.5, 1)]
    assert errors[1] == pytest.approx(errors[0] / 4, rel=0.1)
    assert errors[2] < 0.02 * errors[0]
    same = found.corrected(values, moments, moments, 1)
    assert np.array_equal(same, values)
