"""Tiny checkpoints in Hugging Face form: random weights and a whole tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy bfloat16)
import numpy as np
import safetensors.numpy

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 2, 64, 4, 2, 16, 96, 300
CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
# What a family needs besides.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "smollm3": {},
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
}


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json; a change to None takes the key away."""
    values = {**BASE, **FAMILIES[family], "model_type": family, **changes}
    return {k: v for k, v in values.items() if v is not None or k in FAMILIES[family]}


def random_tensors(values: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights under Hugging Face's names, scaled so that every part matters."""
    rng = np.random.default_rng(seed)
    family, tensors = values["model_type"], {}
    hidden, inner, head = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    q, kv = values["num_attention_heads"] * head, values["num_key_value_heads"] * head

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        scale = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
        tensors[name] = (around + rng.standard_normal(shape) * scale).astype(np.float32)

    add("model.embed_tokens.weight", values["vocab_size"], hidden)
    add("model.norm.weight", hidden, around=1.0)
    if not values.get("tie_word_embeddings"):
        add("lm_head.weight", values["vocab_size"], hidden)
    for i in range(values["num_hidden_layers"]):
        at = f"model.layers.{i}"
        add(f"{at}.input_layernorm.weight", hidden, around=1.0)
        add(f"{at}.post_attention_layernorm.weight", hidden, around=1.0)
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        if family == "phi3":
            add(f"{at}.self_attn.qkv_proj.weight", q + 2 * kv, hidden)
            add(f"{at}.mlp.gate_up_proj.weight", 2 * inner, hidden)
        else:
            for name, count in rows.items():
                add(f"{at}.self_attn.{name}.weight", count, hidden)
                if family == "qwen2" or values.get("attention_bias"):
                    add(f"{at}.self_attn.{name}.bias", count)
            add(f"{at}.mlp.gate_proj.weight", inner, hidden)
            add(f"{at}.mlp.up_proj.weight", inner, hidden)
        add(f"{at}.self_attn.o_proj.weight", hidden, q)
        if values.get("attention_bias"):
            add(f"{at}.self_attn.o_proj.bias", hidden)
        add(f"{at}.mlp.down_proj.weight", hidden, inner)
        if values.get("mlp_bias"):
            for name, count in {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}.items():
                add(f"{at}.mlp.{name}.bias", count)
        if family == "qwen3":
            add(f"{at}.self_attn.q_norm.weight", head, around=1.0)
            add(f"{at}.self_attn.k_norm.weight", head, around=1.0)
    return tensors


def write_folder(
    folder: Path,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    texts: Mapping[str, object] | None = None,
) -> Path:
    """A folder as transformers saves one. texts: further files, as objects or as text."""
    folder.mkdir(parents=True, exist_ok=True)
    values = config() if values is None else values
    (folder / "config.json").write_text(json.dumps(values))
    tensors = random_tensors(values) if tensors is None else tensors
    tensors = {name: array.astype(dtype) for name, array in tensors.items()}
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    else:
        write_shards(folder, tensors, shards)
    for name, text in (texts or {}).items():
        data = text if isinstance(text, str) else json.dumps(text)
        (folder / name).write_text(data, encoding="utf-8")
    return folder


def write_shards(folder: Path, tensors: Mapping[str, np.ndarray], shards: int) -> None:
    """Tensors dealt out to several files, and the index that says where each is."""
    places = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::shards]}
        safetensors.numpy.save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tokenizer_json(extra: Sequence[str] = ()) -> dict[str, Any]:
    """Byte-level BPE over the bytes alone, and control tokens before them."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*CONTROL, *alphabet, *extra]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": True} for i, token in enumerate(CONTROL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }
