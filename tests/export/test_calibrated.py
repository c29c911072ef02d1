"""Whole checkpoints rounded for their inputs: nearer to the source, and otherwise the same."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from exact_bundle import ExactBundle
from tiny_hf import config as hf_config
from tiny_hf import tokenizer_json, write_folder
from tiny_llama import Shape, write_tiny_gguf

from ortolan.errors import CheckpointError, UsageError
from ortolan.export.calibrated import CalibratedCheckpoint, Rounding
from ortolan.export.calibration import LayerRunner
from ortolan.export.exporter import ExportOptions, export_bundle, open_checkpoint
from ortolan.export.precision import Quantization, choose_formats
from ortolan.export.quantize import quantize
from ortolan.export.weights import Weight
from ortolan.graphs.formats import FLOAT32, WeightFormat, layer_name

# As in a text, few tokens make up most of it.
_USED = np.random.default_rng(0).choice(np.arange(3, 100), 30)
WINDOWS = np.random.default_rng(0).choice(_USED, (24, 64))
OTHERS = np.random.default_rng(1).choice(_USED, (8, 64))
SHAPE = Shape(hidden=128, heads=4, kv_heads=2, head_dim=32, inner=192)


def checkpoint_of(path: Path, **changes):
    return open_checkpoint(write_tiny_gguf(path / "m.gguf", shape=SHAPE, **changes), None)


def calibrated(
    checkpoint, fmt: WeightFormat, rounding: Rounding | None = None, **own: WeightFormat
):
    formats = {
        name: fmt if len(checkpoint.read(name).codes.shape) == 2 else kept
        for name, kept in checkpoint.formats.items()
    }
    formats |= own
    rounding = rounding or Rounding()
    return CalibratedCheckpoint(checkpoint, checkpoint.config, formats, WINDOWS, rounding)


def all_weights(checkpoint) -> dict[str, np.ndarray]:
    """In the order in which a writer reads them."""
    return {name: checkpoint.read(name).dequantized() for name in checkpoint.formats}


class Given:
    """A checkpoint of these float weights."""

    def __init__(self, config, weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self.weights = weights
        self.formats = dict.fromkeys(weights, FLOAT32)

    def read(self, name: str) -> Weight:
        return Weight(FLOAT32, self.weights[name])


def hidden_of(checkpoint, windows: np.ndarray = WINDOWS) -> np.ndarray:
    runner = LayerRunner(checkpoint, checkpoint.config, windows)
    hidden = runner.embedded()
    for layer in range(checkpoint.config.num_layers):
        hidden = runner.run(layer, runner.weights(layer), hidden)
    return hidden


def distance(source, weights: dict[str, np.ndarray]) -> float:
    """Of hidden states after the last layer, on tokens that nothing was fitted to."""
    given = hidden_of(Given(source.config, weights), OTHERS)
    return float(np.square(given - hidden_of(source, OTHERS)).mean())


@pytest.mark.parametrize("symmetric", [True, False])
def test_hidden_states_stay_nearer_than_by_rounding_each_weight(
    tmp_path: Path, symmetric: bool
) -> None:
    """On other tokens than those of the calibration: this is what the minutes are spent for."""
    source = checkpoint_of(tmp_path)
    fmt = WeightFormat("int4", 64, affine=not symmetric)
    plain = {
        name: quantize(Weight(FLOAT32, values), fmt).dequantized() if values.ndim == 2 else values
        for name, values in all_weights(source).items()
    }
    found = all_weights(calibrated(source, fmt))
    for weights in (plain, found):
        weights["model.embed_tokens"] = all_weights(source)["model.embed_tokens"]
    assert distance(source, found) < 0.8 * distance(source, plain)


def test_factors_that_are_moved_change_nothing_else(tmp_path: Path, monkeypatch) -> None:
    """What a norm or `up` takes back must be what the next layer was given, bias included."""
    values = hf_config(mlp_bias=True, attention_bias=True)
    source = open_checkpoint(write_folder(tmp_path / "f", values), None)
    # Nothing is rounded, so that only what is moved can be seen.
    monkeypatch.setattr("ortolan.export.calibrated._POWERS", (0.5,))
    monkeypatch.setattr(
        "ortolan.export.calibrated.Rounding.rounded",
        lambda self, values, moments, fmt: Weight(FLOAT32, values),
    )
    rounding = Rounding(correction=0)
    found = all_weights(calibrated(source, WeightFormat("int4", 32), rounding))
    found["model.embed_tokens"] = source.read("model.embed_tokens").codes
    norm, up = "model.layers.0.input_layernorm", "model.layers.1.mlp.up_proj.bias"
    assert np.abs(found[norm] / source.read(norm).codes - 1).max() > 0.1
    assert np.abs(found[up] / source.read(up).codes - 1).max() > 0.1
    v = "model.layers.0.self_attn.v_proj"
    assert np.array_equal(found[f"{v}.bias"], source.read(f"{v}.bias").codes)
    assert distance(source, found) < 1e-9


def test_what_takes_factors_back_is_rounded_all_the_same(tmp_path: Path, monkeypatch) -> None:
    """`up` is scaled for `down`'s sake first, and rounded then."""
    monkeypatch.setattr("ortolan.export.calibrated._POWERS", (0.5,))
    source, fmt = checkpoint_of(tmp_path), WeightFormat("int4", 32)
    found = calibrated(source, fmt)
    formats = {name: found.read(name).format for name in source.formats}
    assert {kind for name, kind in formats.items() if name.endswith("_proj")} == {fmt}


def test_keys_and_values_are_not_scaled(tmp_path: Path) -> None:
    """Graphs of another precision read the same cache."""
    source = checkpoint_of(tmp_path)
    found = all_weights(calibrated(source, WeightFormat("int4", 32)))
    norm = (
        found[layer_name(0, "input_layernorm")]
        / source.read(layer_name(0, "input_layernorm")).codes
    )
    for part in ("self_attn.k_proj", "self_attn.v_proj"):
        before, after = source.read(layer_name(0, part)).codes, found[layer_name(0, part)] * norm
        factors = (before * after).sum(1) / (before**2).sum(1)
        assert np.abs(factors - 1).max() < 0.1


def test_what_the_source_has_already_is_kept(tmp_path: Path) -> None:
    """Rounding twice loses twice; and what is kept must not be scaled for others' sake."""
    source = checkpoint_of(tmp_path, types={"*": "F32", "blk.*.attn_q.weight": "Q8_0"})
    fmt = WeightFormat("int4", 32)
    q = {layer_name(i, "self_attn.q_proj"): WeightFormat("int8", 32) for i in range(2)}
    found = calibrated(source, fmt, **q)
    for name in source.formats:
        weight = found.read(name)
        if "q_proj" in name or name.endswith("input_layernorm"):
            assert np.array_equal(weight.codes, source.read(name).codes)
        elif "_proj" in name:
            assert weight.format == fmt
    assert q.keys().isdisjoint(found._rounds)


def test_table_that_is_the_head_too_is_rounded_for_both(tmp_path: Path) -> None:
    """Logits must gain, and no row that is looked up may be lost for it."""
    source, fmt = checkpoint_of(tmp_path), WeightFormat("int4", 64)
    table = source.read("model.embed_tokens").codes
    found = calibrated(source, fmt).read("model.embed_tokens").dequantized()
    plain = quantize(Weight(FLOAT32, table), fmt).dequantized()
    x = LayerRunner(source, source.config, OTHERS).head_inputs(hidden_of(source, OTHERS))

    def error(rounded: np.ndarray) -> float:
        return float(np.square(x @ (rounded - table).T).mean())

    assert error(found) < 0.9 * error(plain)
    assert np.square(found - table).mean() < 2 * np.square(plain - table).mean()


def test_head_of_its_own_is_rounded_last(tmp_path: Path) -> None:
    """It reads what all the rounded layers before it give."""
    source, fmt = checkpoint_of(tmp_path, tied=False), WeightFormat("int4", 64)
    checkpoint = calibrated(source, fmt)
    found = all_weights(checkpoint)
    x = LayerRunner(source, source.config, OTHERS).head_inputs(hidden_of(source, OTHERS))
    head = source.read("lm_head").codes
    plain = quantize(Weight(FLOAT32, head), fmt).dequantized()
    error = [np.square(x @ (rounded - head).T).mean() for rounded in (found["lm_head"], plain)]
    assert error[0] < 0.9 * error[1]


def test_damaged_weights_are_named_before_they_spread(tmp_path: Path) -> None:
    """An infinite weight makes every number after it meaningless."""
    bad = np.ones((192, 128), np.float32)
    bad[3, 4] = np.inf
    source = checkpoint_of(tmp_path, extra={"blk.1.ffn_up.weight": bad})
    with pytest.raises(CheckpointError, match="not finite"):
        all_weights(calibrated(source, WeightFormat("int4", 32)))


@pytest.mark.parametrize("attention", ["gqa", "onnx"])
def test_bundle_holds_the_calibrated_weights(tmp_path: Path, attention: str) -> None:
    """From the option to the graphs: nearer logits, in the formats that were asked for."""
    source = str(write_tiny_gguf(tmp_path / "m.gguf", shape=SHAPE))
    quantization = Quantization(64, embedding="source", calibrate=True)
    options = ExportOptions("int4", quantization=quantization, attention=attention)
    manifest = export_bundle(source, tmp_path / "found", options)
    assert {g.precision for g in manifest.weights} == {"int4 block 64", "float32"}
    assert manifest.rounded_from == ["float32"]
    plain = replace(options, quantization=replace(quantization, calibrate=False))
    export_bundle(source, tmp_path / "plain", plain)
    export_bundle(source, tmp_path / "source", ExportOptions(attention=attention))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "source" / "tokenizer.json"))
    text = (resources.files("ortolan") / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text).ids[:64]
    names = ("found", "plain", "source")
    logits = {name: ExactBundle(tmp_path / name).prefill(ids) for name in names}
    error = {name: np.square(logits[name] - logits["source"]).mean() for name in logits}
    assert error["found"] < 0.8 * error["plain"]


def test_same_source_makes_the_same_bundle(tmp_path: Path) -> None:
    """A bundle can be made again, and compared by its hashes."""
    source = str(write_tiny_gguf(tmp_path / "m.gguf", shape=SHAPE))
    options = ExportOptions("int4", quantization=Quantization(64, calibrate=True))
    made = [export_bundle(source, tmp_path / name, options).files for name in "ab"]
    assert made[0] == made[1]


def test_one_phase_may_have_nothing_to_round(tmp_path: Path) -> None:
    """Its weights are the source's, and no layer is run for them; keys and values are shared."""
    source = str(write_tiny_gguf(tmp_path / "m.gguf", shape=SHAPE))
    options = ExportOptions(
        prefill_weights="source",
        decode_weights="int4",
        quantization=Quantization(embedding="source", calibrate=True, bits_per_weight=5.0),
    )
    manifest = export_bundle(source, tmp_path / "bundle", options)
    kept = {g.precision for g in manifest.weights if g.phase == "prefill"}
    assert kept == {"float32"}
    export_bundle(source, tmp_path / "source", ExportOptions())
    found, exact = (ExactBundle(tmp_path / name) for name in ("bundle", "source"))
    assert np.allclose(found.prefill([5, 6, 7, 8]), exact.prefill([5, 6, 7, 8]), atol=1e-4)
    assert np.abs(found.decode(9) - exact.decode(9)).max() < 0.5 * np.abs(exact.decode(9)).max()


def test_option_without_anything_to_round_is_refused(tmp_path: Path) -> None:
    """It would take minutes, and change nothing."""
    source = checkpoint_of(tmp_path)
    with pytest.raises(UsageError, match="--calibrate has no effect"):
        choose_formats(source.formats, source.config, "source", Quantization(calibrate=True))


def test_checkpoint_without_a_tokenizer_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """There is no text for a model that nobody can write tokens for."""
    options = ExportOptions("int4", quantization=Quantization(32, calibrate=True))
    bare = write_folder(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        export_bundle(str(bare), tmp_path / "bundle", options)
    assert not (tmp_path / "bundle").exists()
    whole = write_folder(tmp_path / "whole", texts={"tokenizer.json": tokenizer_json()})
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UsageError, match=r"short.txt is too short to calibrate with"):
        export_bundle(str(whole), tmp_path / "bundle", replace(options, calibration=short))
    export_bundle(str(whole), tmp_path / "bundle", options)
