"""A smoothed head: the same numbers but for rounding, and one table for both phases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_llama import Shape, write_tiny_gguf

import ortolan
from ortolan.export.exporter import (
    AttentionChoice,
    ExportOptions,
    export_bundle,
    open_checkpoint,
)
from ortolan.export.phases import plan_phases
from ortolan.export.precision import Quantization
from ortolan.export.presets import PRESETS
from ortolan.export.quantize import quantize
from ortolan.export.smooth import channel_scales, head_can_be_smoothed, smoothed_head
from ortolan.graphs.formats import EMBEDDING, EMBEDDING_SCALE, FINAL_NORM, LM_HEAD
from ortolan.graphs.manifest import Manifest

WINDOWS = np.random.default_rng(0).integers(3, 300, (4, 48))
HEAD_OF_8_BITS = Quantization(lm_head="int8")
# Channels as far apart as in models that need smoothing.
LOUD = {"output_norm.weight": np.geomspace(0.1, 10, Shape().hidden).astype(np.float32)}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    """Whether the head is the embedding's table."""
    return bool(request.param)


def test_scaled_head_computes_the_same(tmp_path: Path, tied: bool) -> None:
    """What the final norm gives is divided by the scales that the head is multiplied with."""
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied), None)
    config = checkpoint.config
    phases = plan_phases(checkpoint, config, "w8a8", "w8a8", HEAD_OF_8_BITS)
    assert head_can_be_smoothed(phases, config)
    scale = channel_scales(checkpoint, config, WINDOWS).head
    assert np.ptp(scale) > 0
    read = smoothed_head(phases[0], config, scale).checkpoint.read
    head = EMBEDDING if tied else LM_HEAD
    plain = [checkpoint.read(name).dequantized() for name in (FINAL_NORM, head)]
    scaled = [read(name).dequantized() for name in (FINAL_NORM, head)]
    np.testing.assert_allclose(scaled[0] * scaled[1], plain[0] * plain[1], rtol=1e-5)
    rows = read(EMBEDDING).dequantized()
    if tied:
        rows = rows * read(EMBEDDING_SCALE).dequantized()
    np.testing.assert_allclose(rows, checkpoint.read(EMBEDDING).dequantized(), rtol=1e-5)


def test_a_channel_that_the_norm_silences_is_looked_up_all_the_same(tmp_path: Path) -> None:
    """Scaled by what the head reads alone, its codes would be all zeros."""
    silent = np.ones(Shape().hidden, np.float32)
    silent[5] = 0
    path = write_tiny_gguf(tmp_path / "tiny.gguf", extra={"output_norm.weight": silent})
    checkpoint = open_checkpoint(path, None)
    config = checkpoint.config
    (phase,) = plan_phases(checkpoint, config, "w8a8", "w8a8", HEAD_OF_8_BITS)
    made = smoothed_head(phase, config, channel_scales(checkpoint, config, WINDOWS).head)
    stored = quantize(made.checkpoint.read(EMBEDDING), made.formats[EMBEDDING]).dequantized()
    found = stored * made.checkpoint.read(EMBEDDING_SCALE).dequantized()
    rows = checkpoint.read(EMBEDDING).dequantized()
    error = np.linalg.norm(found - rows, axis=0) / np.linalg.norm(rows, axis=0)
    assert error[5] < 3 * np.median(error)


def test_an_integer_phase_has_its_head_smoothed_beside_calibrate(tmp_path: Path) -> None:
    """There, `--calibrate` rounds nothing, so the head would get neither."""
    source = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    quantization = Quantization(lm_head="int8", calibrate=True)
    options = ExportOptions("w8a8", quantization=quantization)
    export_bundle(source, tmp_path / "bundle", options)
    assert all(scales_of(tmp_path / "bundle"))


def scales_of(bundle: Path) -> list[bool]:
    """Of each graph, whether it multiplies what it looks up."""
    graphs = [onnx.load(path, load_external_data=False).graph for path in bundle.glob("*.onnx")]
    decoders = [graph for graph in graphs if "input_ids" in {value.name for value in graph.input}]
    return [EMBEDDING_SCALE in {tensor.name for tensor in g.initializer} for g in decoders]


def final_norm(bundle: Path) -> np.ndarray:
    model = onnx.load(bundle / "prefill.onnx")
    (found,) = (t for t in model.graph.initializer if t.name == f"{FINAL_NORM}.weight")
    return onnx.numpy_helper.to_array(found)


def logits(bundle: Path) -> np.ndarray:
    """After each token of a prompt, by prefill."""
    with ortolan.load(bundle) as llm:
        ids = WINDOWS[0, :24].tolist()
        found = llm._running()._model.prefill(0, [ids], [0], [list(range(len(ids)))])
        return np.array(found[0])


@pytest.mark.parametrize("attention", ["gqa", "onnx"])
def test_bundle_loses_no_more_than_rounding(
    tmp_path: Path, tied: bool, attention: AttentionChoice
) -> None:
    """Were a scale missing somewhere, logits would be others altogether."""
    source = str(write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied, extra=LOUD))
    export_bundle(source, tmp_path / "exact", ExportOptions(attention=attention))
    options = ExportOptions(**PRESETS["balanced"].options(), attention=attention)
    export_bundle(source, tmp_path / "balanced", options)
    assert set(scales_of(tmp_path / "balanced")) == {tied}
    assert not np.allclose(*map(final_norm, (tmp_path / "exact", tmp_path / "balanced")))
    exact, found = logits(tmp_path / "exact"), logits(tmp_path / "balanced")
    assert np.corrcoef(exact.ravel(), found.ravel())[0, 1] > 0.99


def test_both_phases_look_up_in_one_table(tmp_path: Path) -> None:
    """It is most of a small model, and scaled alike in both."""
    source = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    options = ExportOptions(**PRESETS["balanced"].options())
    made: Manifest = export_bundle(source, tmp_path / "bundle", options)
    tables = [group for group in made.weights if group.role == "embedding"]
    assert {group.phase for group in tables} == {"decode"}
    assert sorted(group.precision for group in tables) == ["float32", "int8 block 64"]


def test_calibrated_weights_have_no_scaled_table(tmp_path: Path) -> None:
    """Calibration runs the layers on rows as the checkpoint has them."""
    source = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    options = ExportOptions(**PRESETS["fast"].options())
    export_bundle(source, tmp_path / "bundle", options)
    assert not any(scales_of(tmp_path / "bundle"))


def test_a_head_that_is_not_rounded_stays_as_it_is(tmp_path: Path) -> None:
    """Scaled, its codes would have to be rounded again, which nobody asked for."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", types={"*": "F32", "token_embd*": "Q8_0"})
    checkpoint = open_checkpoint(path, None)
    phases = plan_phases(checkpoint, checkpoint.config, "w8a8", "blocks", Quantization())
    assert not head_can_be_smoothed(phases, checkpoint.config)
