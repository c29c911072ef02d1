"""Smoothing for 8-bit activations: exact but for rounding, and out of the KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import Shape, write_tiny_gguf

from ortolan.export.calibration import LayerRunner
from ortolan.export.exporter import open_checkpoint
from ortolan.export.phases import Phase, plan_phases
from ortolan.export.precision import DEFAULT_QUANTIZATION, WeightsChoice
from ortolan.export.smooth import FoldedCheckpoint, channel_scales, smoothed
from ortolan.graphs.formats import W8A8, WeightFormat, layer_name

WINDOWS = np.random.default_rng(0).integers(3, 300, (4, 48))
SHAPE = Shape(layers=3)  # one between those whose last product stays in blocks


def planned(folder: Path, weights: WeightsChoice, types: dict[str, str] | None = None) -> Phase:
    path = write_tiny_gguf(folder / "tiny.gguf", shape=SHAPE, types=types or {"*": "F32"})
    checkpoint = open_checkpoint(Path(path), None)
    (only,) = plan_phases(checkpoint, checkpoint.config, weights, weights, DEFAULT_QUANTIZATION)
    return only


def smoothed_phase(phase: Phase) -> Phase:
    config = phase.checkpoint.config
    return smoothed(phase, config, channel_scales(phase.checkpoint, config, WINDOWS).layers)


@pytest.fixture(scope="module")
def phase(tmp_path_factory: pytest.TempPathFactory) -> Phase:
    return planned(tmp_path_factory.mktemp("smooth"), "w8a8")


@pytest.fixture(scope="module")
def smooth(phase: Phase) -> Phase:
    return smoothed_phase(phase)


def test_scaled_weights_compute_the_same(phase: Phase, smooth: Phase) -> None:
    """What a norm, or `up`, gives is divided by the scales that its readers are multiplied with."""
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
    assert isinstance(smooth.checkpoint, FoldedCheckpoint)
    for name in smooth.made:
        if name.endswith(("k_proj", "v_proj", "q_proj")):
            assert smooth.checkpoint.folds[name].rows is None
        assert not name.endswith("o_proj")


def test_what_loses_most_stays_in_blocks(smooth: Phase) -> None:
    """The MLP's last product in the first layers and the last."""
    formats = [smooth.formats[layer_name(layer, "mlp.down_proj")] for layer in range(3)]
    assert formats == [WeightFormat("int8", 32), W8A8, WeightFormat("int8", 32)]
    assert smooth.formats[layer_name(0, "mlp.up_proj")] == W8A8


@pytest.mark.parametrize("weights", ["w8a8", "blocks"])
def test_what_is_rounded_to_8_bits_is_smoothed(tmp_path: Path, weights: WeightsChoice) -> None:
    """Blocks too: their activations share scales as well, and lose less for it."""
    made = smoothed_phase(planned(tmp_path, weights)).made
    for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm"):
        assert layer_name(1, part) in made


def test_what_the_source_has_stays_as_it_is(tmp_path: Path) -> None:
    """Scaled, its codes would have to be rounded again; so what it reads is not scaled either."""
    types = {"*": "Q4_1", "*ffn_up*": "Q8_0", "*attn_v*": "Q8_0"}
    phase = planned(tmp_path, "blocks", types)
    smooth = smoothed_phase(phase)
    assert not smooth.made  # gate alone is rounded, q and k are
    assert smooth is phase
    assert smoothed_phase(planned(tmp_path, "source", types)).made == frozenset()


def test_4_bits_are_left_to_calibration(tmp_path: Path) -> None:
    """Which knows the rounding error that it scales for."""
    assert not smoothed_phase(planned(tmp_path, "int4")).made
