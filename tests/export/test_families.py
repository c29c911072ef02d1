"""Configs of families as they are published: older spellings, and settings that say it twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy bfloat16)
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ortolan.export.hf_reader import HfCheckpoint
from ortolan.graphs.formats import FLOAT32
from ortolan.graphs.manifest import ModelConfig

ARCH = Path(__file__).parents[1] / "data" / "arch"


def changed(tmp_path: Path, name: str, drop: tuple[str, ...], **changes: Any) -> ModelConfig:
    """The shape of that checkpoint with another config.json."""
    folder = shutil.copytree(ARCH / name, tmp_path / name)
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    values = {key: value for key, value in values.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(values))
    return HfCheckpoint(folder).config


# What transformers 5 wrote -> keys to drop and to add for the spelling of the published configs.
OLDER: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gemma": (
        ("rope_parameters", "use_bidirectional_attention"),
        {"hidden_act": "gelu", "hidden_activation": None, "rope_theta": 10000.0},
    ),
    "gemma2": (
        ("rope_parameters", "layer_types", "use_bidirectional_attention"),
        {
            "hidden_act": "gelu_pytorch_tanh",
            "cache_implementation": "hybrid",
            "sliding_window_size": 7,
            "rope_theta": 10000.0,
            "rope_scaling": None,
        },
    ),
    "gemma3": (
        ("rope_parameters", "layer_types", "_sliding_window_pattern"),
        {
            "cache_implementation": "hybrid",
            "sliding_window_pattern": 6,
            "rope_theta": 50000.0,
            "rope_local_base_freq": 200.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "olmo2": (("rope_parameters",), {"rope_theta": 10000.0, "rope_scaling": None}),
}


@pytest.mark.parametrize("name", OLDER)
def test_the_published_spelling_makes_the_same_model(tmp_path: Path, name: str) -> None:
    """Models on the Hub are years older than the way in which transformers writes configs now."""
    drop, changes = OLDER[name]
    assert changed(tmp_path, name, drop, **changes) == HfCheckpoint(ARCH / name).config


def test_what_a_gemma_config_leaves_out_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    """A cap that is absent is 50 and 30 in Gemma 2, and null means none; Gemma 3 has none."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    second = changed(tmp_path / "absent", "gemma2", (*caps, "query_pre_attn_scalar"))
    assert (second.attention_softcap, second.logits_softcap) == (50.0, 30.0)
    assert second.attention_scale == 1 / 16
    null = changed(tmp_path / "null", "gemma2", (), **dict.fromkeys(caps))
    assert (null.attention_softcap, null.logits_softcap) == (0.0, 0.0)
    third = changed(tmp_path / "third", "gemma3", (*caps, "rope_parameters"))
    assert (third.attention_softcap, third.logits_softcap) == (0.0, 0.0)
    assert (third.rope_theta, third.window_rope_theta) == (1_000_000.0, 10_000.0)


def test_rotary_tables_are_made_for_kinds_of_layers_that_there_are(tmp_path: Path) -> None:
    """A table of 131,072 positions that no layer reads would be 64 MB of the bundle."""
    assert changed(tmp_path / "a", "gemma3", ()).ropes == ["global", "local"]
    full = changed(tmp_path / "b", "gemma3", (), layer_types=["full_attention"] * 6)
    assert full.ropes == ["global"]
    sliding = changed(tmp_path / "c", "gemma3", (), layer_types=["sliding_attention"] * 6)
    assert sliding.ropes == ["local"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_is_added_to_a_gemma_norm_in_float32(tmp_path: Path, dtype: str) -> None:
    """In the file's own 16 bits, the sum would lose most of what the weight says."""
    folder = shutil.copytree(ARCH / "gemma", tmp_path / "gemma")
    stored = {k: v.astype(dtype) for k, v in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors")
    checkpoint, name = HfCheckpoint(folder), "model.layers.0.input_layernorm"
    assert checkpoint.formats[name] == checkpoint.read(name).format == FLOAT32
    expected = stored[f"{name}.weight"].astype(np.float32) + np.float32(1)
    np.testing.assert_array_equal(checkpoint.read(name).codes, expected)
