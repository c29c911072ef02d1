"""Hugging Face folders with one wrong thing: one sentence that names it, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_hf import config, random_tensors, write_folder

from ortolan.errors import CheckpointError, ConfigError, UsageError
from ortolan.export.exporter import ExportOptions, export_bundle

Tensors = dict[str, np.ndarray]


def refusal(source: Path, kind: type[Exception] = CheckpointError, **options: Any) -> str:
    """The message with which an export refuses `source`; nothing may be left of it."""
    target = source.parent / "out" / "bundle"
    target.parent.mkdir()
    with pytest.raises(kind) as caught:
        export_bundle(str(source), target, ExportOptions(**options))
    assert list(target.parent.iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def deep(**settings: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "linear", "factor": 2.0, **settings}}


def gemma(family: str, **settings: Any) -> dict[str, Any]:
    window = {} if family == "gemma" else {"sliding_window": 8}
    return {"model_type": family, "hidden_act": "gelu_pytorch_tanh", **window, **settings}


# Changes to config.json and what the message must name.
CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another-world": ({"model_type": "mamba"}, ["model_type", "'mamba'", "llama"]),
    "no-type": ({"model_type": None}, ["model_type", "None"]),
    "unknown-rope": ({"rope_scaling": {"rope_type": "spiral"}}, ["rope_type", "'spiral'"]),
    "dynamic-rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'"]),
    "rope-of-no-name": ({"rope_scaling": {"rope_type": 0}}, ["rope_type", "0"]),
    "two-ropes": (
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        ["'linear'", "'yarn'"],
    ),
    "two-thetas": ({"rope_parameters": {"rope_theta": 5.0}}, ["rope_theta", "10000.0", "5.0"]),
    "two-scalings": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear"}},
        ["rope_scaling"],
    ),
    "deep-setting": (deep(mystery=[1, {"x": 2}]), ["rope_scaling.mystery", "[1, {'x': 2}]"]),
    "no-factor": ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "missing"]),
    "factor-below-one": (deep(factor=0.5), ["rope_scaling.factor", "0.5"]),
    "factor-of-text": (deep(factor="2"), ["rope_scaling.factor", "'2'"]),
    "theta-too-small": ({"rope_theta": 1.0}, ["rope_theta", "1.0"]),
    "heads-do-not-divide": ({"num_key_value_heads": 3}, ["4 attention heads", "3 key-value"]),
    "hidden-does-not-divide": ({"head_dim": None, "hidden_size": 66}, ["66", "4 heads"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
    "unknown-setting": ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
    "quantized": (
        {"quantization_config": {"quant_method": "fp8"}},
        ["quantization_config", "fp8"],
    ),
    "interleaved": ({"rope_interleaved": True}, ["rope_interleaved", "True"]),
    "huge-number": ({"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
    "huge-head": ({"head_dim": 10**12}, ["head_dim", "1000000000000"]),
    "endless-layers": ({"num_hidden_layers": 10**9}, ["1000000000 layers"]),
    "endless-context": ({"max_position_embeddings": 10**9}, ["1,000,000,000", "--max-context"]),
    "fractional-layers": ({"num_hidden_layers": 1.5}, ["num_hidden_layers", "1.5"]),
    "boolean-size": ({"hidden_size": True}, ["hidden_size", "True"]),
    "mistral-without-kv-heads": (
        {"model_type": "mistral", "num_key_value_heads": None},
        ["num_key_value_heads", "missing"],
    ),
    "window-without-switch": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
        ["layer_types", "sliding_attention"],
    ),
    "kinds-of-layers": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4,
         "layer_types": ["full_attention", "linear_attention"]},
        ["layer_types", "linear_attention"],
    ),
    "no-rope-layers": (
        {"model_type": "smollm3", "no_rope_layers": [1, [0]]},
        ["no_rope_layers"],
    ),
    "turned-in-part": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    "gemma-vision": ({"model_type": "gemma3"}, ["model_type", "'gemma3'", "gemma3_text"]),
    "gemma-activation": (gemma("gemma", hidden_act="silu"), ["hidden_act", "'silu'"]),
    "gemma-other-activation": (
        gemma("gemma2", hidden_activation="gelu"), ["hidden_activation", "'gelu'"]
    ),
    "gemma-head-size": (gemma("gemma", head_dim=None), ["head_dim", "missing"]),
    "gemma-two-ways": (
        gemma("gemma", use_bidirectional_attention=True), ["use_bidirectional_attention", "True"]
    ),
    "gemma2-two-ways": (
        gemma("gemma2", use_bidirectional_attention=True), ["use_bidirectional_attention", "True"]
    ),
    "gemma3-two-ways": (
        gemma("gemma3_text", use_bidirectional_attention=True),
        ["use_bidirectional_attention", "True"],
    ),
    "gemma-caps": (gemma("gemma", final_logit_softcapping=9.0), ["final_logit_softcapping", "9.0"]),
    "gemma2-cap": (gemma("gemma2", attn_logit_softcapping=-1.0), ["attn_logit_softcapping", "-1"]),
    "gemma2-two-windows": (gemma("gemma2", sliding_window_size=9), ["sliding_window_size", "9"]),
    "gemma2-no-window": (gemma("gemma2", sliding_window=None), ["sliding_window", "missing"]),
    "gemma2-two-ropes": (
        gemma("gemma2", rope_local_base_freq=10.0), ["rope_local_base_freq", "10.0"]
    ),
    "gemma3-cap": (
        gemma("gemma3_text", attn_logit_softcapping=50.0), ["attn_logit_softcapping", "50.0"]
    ),
    "gemma3-kinds": (
        gemma("gemma3_text", layer_types=["full_attention", "chunked_attention"]),
        ["layer_types", "chunked_attention"],
    ),
    "gemma3-pattern": (
        gemma("gemma3_text", _sliding_window_pattern=3), ["_sliding_window_pattern", "3"]
    ),
    "gemma3-local-rope": (
        gemma("gemma3_text", rope_parameters={"sliding_attention": {"rope_type": "yarn"}}),
        ["rope_parameters.sliding_attention.rope_type", "'yarn'"],
    ),
    "gemma3-local-setting": (
        gemma("gemma3_text", rope_parameters={"sliding_attention": {"factor": 2.0}}),
        ["rope_parameters.sliding_attention.factor", "2.0"],
    ),
    "gemma3-rope-of-no-kind": (
        gemma("gemma3_text", rope_parameters={"rope_type": "linear", "factor": 2.0}),
        ["rope_parameters.rope_type", "'linear'"],
    ),
    "gemma3-two-local-thetas": (
        gemma("gemma3_text", rope_local_base_freq=5.0,
              rope_parameters={"sliding_attention": {"rope_theta": 6.0}}),
        ["rope_local_base_freq", "5.0", "rope_parameters.sliding_attention.rope_theta", "6.0"],
    ),
    "gemma3-local-theta": (gemma("gemma3_text", rope_local_base_freq=1.0), ["1.0", "above 1"]),
    "olmo2-activation": ({"model_type": "olmo2", "hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
    "olmo2-clip": ({"model_type": "olmo2", "clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
    "phi-head-bias": ({"model_type": "phi3", "lm_head_bias": True}, ["lm_head_bias", "True"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_that_we_cannot_express_are_refused_by_name_and_value(
    tmp_path: Path, name: str
) -> None:
    """Passed over in silence, each of them would make another model."""
    changes, expected = CONFIGS[name]
    source = write_folder(tmp_path / "model", config(), random_tensors(config()))
    (source / "config.json").write_text(json.dumps(config(**changes)))
    message = refusal(source)
    for part in expected:
        assert part in message


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: str = "float32") -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: np.ones(shape, dtype)})


TENSORS: dict[str, tuple[Callable[[Tensors], Any], list[str]]] = {
    "missing": (drop("model.layers.1.mlp.up_proj.weight"), ["layers.1.mlp.up_proj", "missing"]),
    "no-head": (drop("lm_head.weight"), ["lm_head.weight", "missing"]),
    "extra": (put("model.layers.0.self_attn.q_norm.weight", 16), ["q_norm", "unknown"]),
    "layer-too-many": (put("model.layers.2.mlp.up_proj.weight", 96, 64), ["layers.2", "unknown"]),
    "wrong-shape": (
        put("model.layers.0.mlp.down_proj.weight", 96, 64),
        ["layers.0.mlp.down_proj.weight", "[96, 64]", "[64, 96]"],
    ),
    "wrong-rank": (put("model.norm.weight", 64, 1), ["model.norm.weight", "[64, 1]", "[64]"]),
    "not-finite": (
        lambda tensors: tensors["model.norm.weight"].__setitem__(3, np.nan),
        ["model.norm.weight", "not finite"],
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path: Path, name: str) -> None:
    """Broadcasting, or leaving one out, would give a model that runs."""
    change, expected = TENSORS[name]
    tensors = random_tensors(config())
    change(tensors)
    message = refusal(write_folder(tmp_path / "model", config(), tensors))
    for part in expected:
        assert part in message


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "float64"])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: str) -> None:
    """Float8 comes with scales that a plain reading would leave out."""
    tensors = random_tensors(config())
    name = "model.layers.0.mlp.up_proj.weight"
    source = write_folder(tmp_path / "model", config(), tensors)
    rewrite_dtype(source / "model.safetensors", name, tensors, dtype)
    message = refusal(source, ConfigError)
    spelled = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "float64": "F64"}
    assert spelled[dtype] in message
    assert name in message


def rewrite_dtype(path: Path, name: str, tensors: Tensors, dtype: str) -> None:
    import ml_dtypes
    import safetensors.numpy

    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    tensors[name] = tensors[name].astype(kind)
    safetensors.numpy.save_file(tensors, path)


def test_a_context_beyond_the_models_own_is_refused(tmp_path: Path) -> None:
    """Past its positions a model answers nonsense, fluently."""
    message = refusal(write_folder(tmp_path / "model"), UsageError, max_context=65)
    assert "65" in message
    assert "64" in message
