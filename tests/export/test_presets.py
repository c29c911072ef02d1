"""Presets: what they ask for, and what they promise."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from tiny_llama import Shape, write_tiny_gguf

from ortolan.export import exporter
from ortolan.export.exporter import ExportOptions, export_bundle, open_checkpoint
from ortolan.export.phases import Phase
from ortolan.export.precision import Quantization, WeightsChoice, choose_formats
from ortolan.export.presets import PRESETS, Bound, broken_promise
from ortolan.graphs.formats import FLOAT32, W8A8, WeightFormat, layer_name, weight_shapes
from ortolan.graphs.manifest import AccuracyReport, Manifest, TextAccuracy


def report(mean_kl: float, top1: float, phase: str = "") -> AccuracyReport:
    total = TextAccuracy("all", 100, mean_kl, 0.1, top1, 10.0, 10.0)
    return AccuracyReport("default", "float32", "onnxruntime", total, [], phase)


@pytest.mark.parametrize(
    ("mean_kl", "top1", "said"),
    [
        (0.015, 0.94, None),
        (0.016, 0.94, "mean KL is 0.016, at most 0.015 is promised"),
        (0.015, 0.93, "same for 93.0%, at least 94% is promised"),
        (0.015, math.nan, "same for nan%"),
        (math.nan, 0.94, "mean KL is nan"),
    ],
)
def test_bound_says_what_exceeds_it(mean_kl: float, top1: float, said: str | None) -> None:
    """A NaN compares as False, and must not pass for that."""
    found = Bound(0.015, 0.94).exceeded_by(report(mean_kl, top1))
    assert found == said if said is None else said in (found or "")


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("presets")
    types = {"*": "Q4_1", "token_embd*": "Q8_0"}
    source = write_tiny_gguf(folder / "tiny.gguf", types=types, shape=Shape(layers=3))
    options = ExportOptions(preset="balanced", **PRESETS["balanced"].options())
    return export_bundle(str(source), folder / "bundle", options)


def test_every_phase_keeps_the_promise(balanced: Manifest) -> None:
    """An answer is written by decode: a report of prefill alone would say nothing of it."""
    good, bad = report(0.01, 0.95, "prefill"), report(0.2, 0.95, "decode")
    fine = dataclasses.replace(balanced, accuracy_reports=[good])
    assert broken_promise("balanced", fine) is None
    broken = broken_promise("balanced", dataclasses.replace(fine, accuracy_reports=[good, bad]))
    assert broken is not None
    assert broken.endswith("by preset balanced in decode")


def test_balanced_has_weights_for_each_phase(balanced: Manifest) -> None:
    """And the manifest says what it was made as."""
    assert balanced.preset == "balanced"
    assert balanced.phases_differ
    precisions = {(g.phase, g.precision) for g in balanced.weights if g.role == "mlp"}
    assert {kind for phase, kind in precisions if phase == "decode"} == {"int8 block 64"}
    # The last product of some layers, which would lose most, stays in blocks.
    prefill = {kind for phase, kind in precisions if phase == "prefill"}
    assert prefill == {str(W8A8), "int8 block 64"}


@pytest.mark.parametrize(("layers", "at_either_end"), [(2, 1), (3, 1), (20, 5), (30, 8), (80, 20)])
def test_first_and_last_layers_keep_blocks(tmp_path: Path, layers: int, at_either_end: int) -> None:
    """They lose most (docs/presets.md); the others' last products are most of what is gained."""
    tiny = open_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf"), None).config
    config = dataclasses.replace(tiny, num_layers=layers)
    source = dict.fromkeys(weight_shapes(config), FLOAT32)
    formats = choose_formats(source, config, "w8a8", PRESETS["balanced"].quantization)
    found = [formats[layer_name(layer, "mlp.down_proj")] for layer in range(layers)]
    end = [WeightFormat("int8", 64)] * at_either_end
    assert found == [*end, *[W8A8] * (layers - 2 * at_either_end), *end]


def test_only_phases_in_blocks_are_calibrated_beyond_smoothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a phase of integers some blocks remain, of 8 bits: minutes that nothing came of."""
    rounded = []

    def calibrated(phase: Phase, *args: object) -> Phase:
        rounded.append(phase.name)
        return phase

    monkeypatch.setattr(exporter, "calibrated", calibrated)
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    options = ExportOptions(**PRESETS["fast"].options())
    export_bundle(str(source), tmp_path / "bundle", options)
    assert rounded == ["decode"]


@pytest.mark.parametrize("lm_head", ["int4", "w8a8"])
def test_4_bits_are_calibrated_and_not_smoothed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm_head: WeightsChoice
) -> None:
    """Nothing would come of another reading of the text; a head of its own changes no layer."""
    rounded = []

    def smooths(*args: object) -> None:
        raise AssertionError("there is nothing to smooth")

    def calibrated(phase: Phase, *args: object) -> Phase:
        rounded.append(phase.name)
        return phase

    monkeypatch.setattr(exporter, "channel_scales", smooths)
    monkeypatch.setattr(exporter, "calibrated", calibrated)
    source = write_tiny_gguf(tmp_path / "tiny.gguf", tied=False)
    quantization = Quantization(embedding="int8", lm_head=lm_head, calibrate=True)
    options = ExportOptions("int4", quantization=quantization)
    export_bundle(str(source), tmp_path / "bundle", options)
    assert rounded == [""]


@pytest.mark.parametrize(("name", "block_size"), [("fast", 64), ("small", 128)])
def test_small_blocks_are_calibrated(name: str, block_size: int, tmp_path: Path) -> None:
    """Rounded to nearest, blocks of four bits would lose too much."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    options = ExportOptions(**PRESETS[name].options())  # type: ignore[index]
    made = export_bundle(str(source), tmp_path / "bundle", options)
    assert options.quantization.calibrate
    decode = {g.precision for g in made.weights if g.role == "mlp" and g.phase in ("", "decode")}
    assert decode == {f"int4 block {block_size}"}
    assert next(g.precision for g in made.weights if g.role == "embedding").startswith("int8")
