"""Smoothing for 8-bit activations: exact but for rounding, and out of the KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import write_tiny_gguf

from ortolan.export.calibration import LayerRunner
from ortolan.export.exporter import open_checkpoint
from ortolan.export.phases import Phase, plan_phases
from ortolan.export.precision import DEFAULT_QUANTIZATION
from ortolan.export.smooth import smoothed
from ortolan.graphs.formats import W8A8, WeightFormat, layer_name

WINDOWS = np.random.default_rng(0).integers(3, 300, (4, 48))


@pytest.fixture(scope="module")
def phase(tmp_path_factory: pytest.TempPathFactory) -> Phase:
    path = write_tiny_gguf(tmp_path_factory.mktemp("smooth") / "tiny.gguf")
    checkpoint = open_checkpoint(Path(path), None)
    (only,) = plan_phases(checkpoint, checkpoint.config, "w8a8", "w8a8", DEFAULT_QUANTIZATION)
    return only


@pytest.fixture(scope="module")
def smooth(phase: Phase) -> Phase:
    return smoothed(phase, phase.checkpoint.config, WINDOWS)


def test_scaled_weights_compute_the_same(phase: Phase, smooth: Phase) -> None:
    """What a norm gives is divided by the scales that its readers are multiplied with."""
    config = phase.checkpoint.config
    plain = LayerRunner(phase.checkpoint, config, WINDOWS)
    scaled = LayerRunner(smooth.checkpoint, config, WINDOWS)
    hidden = plain.embedded()
    for layer in range(config.num_layers):
        expected = plain.run(layer, plain.weights(layer), hidden)
        found = scaled.run(layer, scaled.weights(layer), hidden)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
        hidden = expected


def test_scales_do_not_reach_the_cache(smooth: Phase) -> None:
    """The other phase reads the same keys and values: rows of k and v are as they were."""
    for name in smooth.made:
        folds = smooth.checkpoint.folds[name]  # type: ignore[attr-defined]
        if name.endswith(("k_proj", "v_proj", "q_proj")):
            assert folds.rows is None
        assert not name.endswith("o_proj")


def test_what_loses_most_stays_in_blocks(smooth: Phase) -> None:
    """The MLP's last product: nothing before it can be scaled at no cost."""
    assert smooth.formats[layer_name(0, "mlp.down_proj")] == WeightFormat("int8", 32)
    assert smooth.formats[layer_name(0, "mlp.up_proj")] == W8A8
    assert layer_name(0, "mlp.down_proj") not in smooth.made
