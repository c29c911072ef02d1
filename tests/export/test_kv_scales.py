"""Scales of an int8 KV cache: they hold every key, wherever in the context it stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from exact_bundle import ExactBundle
from tiny_hf import config, write_folder
from tiny_llama import write_tiny_gguf

from ortolan.errors import CheckpointError, UsageError
from ortolan.export.exporter import ExportOptions, export_bundle, open_checkpoint
from ortolan.export.kv_scales import kv_scales
from ortolan.graphs import contract as c
from ortolan.graphs.manifest import Manifest

ARCH = Path(__file__).parents[1] / "data" / "arch"
IDS = np.random.default_rng(0).integers(3, 99, (2, 24))
LENGTH = IDS.shape[1]


def float_kv(bundle: ExactBundle, layer: int) -> dict[str, np.ndarray]:
    """A layer's keys and values [kv_heads, LENGTH, head_dim] after a prompt of that length."""
    names = {"k_scale": "key", "v_scale": "value"}
    return {
        scale: bundle._kv[c.past_name(layer, part)][0, :, :LENGTH]  # type: ignore[arg-type]
        for scale, part in names.items()
    }


@pytest.mark.parametrize("name", ["llama", "smollm3", "qwen3", "gemma3", "olmo2"])
def test_scales_are_the_largest_values_of_the_float_cache(tmp_path: Path, name: str) -> None:
    """Norms, biases, windows and kinds of rope all have their part in a key."""
    own = ARCH / name
    source = own if own.is_dir() else write_folder(tmp_path / name, config(name))
    export_bundle(str(source), tmp_path / "bundle", ExportOptions("float32", attention="onnx"))
    checkpoint = open_checkpoint(source, None)
    model = checkpoint.config
    # A context of the text's own length: what its positions hold is nearly all there is to hold.
    scales = kv_scales(checkpoint, replace(model, max_context=LENGTH), IDS)
    for layer in range(model.num_layers):
        seen: dict[str, np.ndarray] = {}
        for ids in IDS:
            bundle = ExactBundle(tmp_path / "bundle")
            bundle.prefill(ids.tolist())
            for part, kv in float_kv(bundle, layer).items():
                seen[part] = np.maximum(seen.get(part, 0), np.abs(kv).max(1))
        for part, largest in seen.items():
            scale = scales[f"model.layers.{layer}.self_attn.{part}"]
            assert scale.shape == (model.num_kv_heads, 1, model.head_dim)
            held = scale[:, 0] * 127
            assert (largest <= held * (1 + 1e-5)).all()
            if part == "v_scale" or not model.layer_turns(layer):
                np.testing.assert_allclose(held, largest, rtol=1e-4)


def test_no_key_grows_out_of_its_scale_at_a_later_position(tmp_path: Path) -> None:
    """A key that is small in one dimension early on is large in it later: it was 0.2 nats."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    export_bundle(str(source), tmp_path / "bundle", ExportOptions("float32"))
    checkpoint = open_checkpoint(source, None)
    token = 7
    # One token's keys do not depend on what is before it in the first layer, but for the angle.
    scales = kv_scales(checkpoint, checkpoint.config, np.full((1, 2), token))
    held = 127 * scales["model.layers.0.self_attn.k_scale"][:, 0]
    bundle = ExactBundle(tmp_path / "bundle")
    bundle.prefill([token] * checkpoint.config.max_context)
    keys = np.abs(bundle._kv[c.past_name(0, "key")][0, :, : checkpoint.config.max_context])
    assert (keys.max(1) <= held * (1 + 1e-5)).all()
    assert (keys.max(1) > 0.9 * held).all()
    assert (keys[:, :2].max(1) < 0.5 * held).any()  # or nothing was tested


def test_scales_are_constants_of_all_decoder_graphs(tmp_path: Path) -> None:
    """Codes that one graph writes, another reads."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf", types="Q4_1")
    manifest = export_bundle(str(source), tmp_path / "bundle", ExportOptions(kv="int8"))
    assert manifest.dtypes.kv == "int8"
    assert Manifest.read(tmp_path / "bundle") == manifest
    found = []
    for graph in (c.DECODE, c.PREFILL, c.PREFILL_RAGGED):
        model = onnx.load(tmp_path / "bundle" / f"{graph}.onnx", load_external_data=False)
        scales = [
            tensor.SerializeToString()
            for tensor in model.graph.initializer
            if tensor.name.endswith(("k_scale", "v_scale"))
        ]
        assert len(scales) == 2 * manifest.model.num_layers
        found.append(scales)
    assert found[0] == found[1] == found[2]


def test_standard_operators_have_no_int8_cache(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    options = ExportOptions(attention="onnx", kv="int8")
    with pytest.raises(UsageError, match=r"--kv int8 is not possible .* take --attention gqa"):
        export_bundle(str(source), tmp_path / "bundle", options)


def test_model_without_tokenizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """There is nothing to read the calibration text with."""
    source = write_folder(tmp_path / "model", config("llama"))
    with pytest.raises(CheckpointError, match="no tokenizer to read one with"):
        export_bundle(str(source), tmp_path / "bundle", ExportOptions(kv="int8"))
    assert not (tmp_path / "bundle").exists()
