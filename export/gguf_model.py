"""A model as llama.cpp describes it in GGUF: its settings, tensor names and row order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.families.base import check_heads
from ortolan.export.gguf_families import FORMS, Gguf
from ortolan.export.gguf_rope import ReadVector, read_gguf_rope
from ortolan.export.settings import Settings
from ortolan.graphs.formats import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    layer_name,
    layer_norms,
    weight_shapes,
)
from ortolan.graphs.manifest import ModelConfig

# Far above any that exists; a damaged number must not make tables of gigabytes.
_LARGEST_HEAD = 4096

# State-dict names -> GGUF's, both without ".weight"; the second table within a layer.
_TOP = {EMBEDDING: "token_embd", FINAL_NORM: "output_norm", LM_HEAD: "output"}
_PARTS: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Of the tensors that share a switch in ModelConfig, the one whose bias tells.
_BIASES = {"attn_q": "qkv_bias", "attn_output": "attention_out_bias", "ffn_down": "mlp_bias"}


def model_config(
    file: str,
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    vector: ReadVector,
    requested_context: int | None = None,
) -> ModelConfig:
    """The model's shape from a GGUF file's metadata and the names of its tensors.

    Raises ConfigError for another architecture or a setting that is not known here, by its name
    and value; CheckpointError for a setting that is missing or contradicts another.
    """
    architecture = metadata.get("general.architecture")
    form = FORMS.get(architecture) if isinstance(architecture, str) else None
    if form is None:
        raise ConfigError(
            f"{file}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(map(repr, FORMS))}"
        )
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    settings = Settings(file, values, prefix)
    layers = settings.integer("block_count")
    if layers > len(tensors):  # before anything is made for each of them
        raise CheckpointError(
            f"{file}: {layers} layers are announced, but there are only {len(tensors)} tensors; "
            "the file is damaged or incomplete"
        )
    biases = {
        switch: f"blk.0.{part}.bias" in tensors
        for part, switch in _BIASES.items()
        if part in form.biases
    }
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": _vocab_size(settings, metadata.get("tokenizer.ggml.tokens")),
        "intermediate_size": settings.integer("feed_forward_length"),
        "num_layers": layers,
        "rms_norm_eps": float(settings.number("attention.layer_norm_rms_epsilon")),
        "tie_embeddings": "output.weight" not in tensors,
        **_heads_and_rope(settings, form, vector, requested_context),
        **biases,
        **form.own(settings, layers),
    }
    settings.expect("expert_count", 0)
    settings.expect("expert_used_count", 0)
    settings.expect("attention.causal", True)
    settings.ignore("rope.scaling.finetuned")  # says how it came about; granite reads it
    settings.finish()
    return ModelConfig(**fields)


def _vocab_size(settings: Settings, tokens: object) -> int:
    num_tokens = len(tokens) if isinstance(tokens, list) else None
    vocab_size = settings.integer("vocab_size", num_tokens)
    if num_tokens is not None and num_tokens > vocab_size:
        raise CheckpointError(
            f"{settings.where}: the tokenizer has {num_tokens} tokens, the model knows {vocab_size}"
        )
    return vocab_size


def _heads_and_rope(
    settings: Settings, form: Gguf, vector: ReadVector, requested_context: int | None
) -> dict[str, Any]:
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    kv_heads = settings.integer("attention.head_count_kv", heads)
    check_heads(settings, heads, kv_heads)
    if settings.get("attention.key_length") is None and hidden % heads:
        raise CheckpointError(
            f"{settings.where}: {settings.prefix}embedding_length {hidden} does not divide among "
            f"{heads} heads"
        )
    head_dim = settings.integer("attention.key_length", hidden // heads)
    whole = ["attention.value_length"]
    if form.paired_rows:  # a part of interleaved pairs is no part of halves
        whole.append("rope.dimension_count")
    for key in whole:
        if (size := settings.integer(key, head_dim)) != head_dim:
            raise ConfigError(
                f"{settings.where}: setting {settings.prefix}{key} = {size} differs from the head "
                f"size {head_dim}, which is not supported"
            )
    rotary_dim = settings.integer("rope.dimension_count", head_dim)
    if head_dim > _LARGEST_HEAD or not 2 <= rotary_dim <= head_dim:
        raise ConfigError(
            f"{settings.where}: a head of {head_dim} numbers, {rotary_dim} of them turned, is not "
            "supported"
        )
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        **read_gguf_rope(settings, head_dim, vector, requested_context).fields(),
    }


def stored_weights(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """GGUF's tensor name -> the weights that it holds, for exactly the tensors of this model."""
    fused = FORMS[config.architecture].fused
    stored: dict[str, tuple[str, ...]] = {}
    held = {part for parts in fused.values() for part in parts}
    names_within_layer = {**_PARTS, **_norm_names(config)}
    for name in weight_shapes(config):
        if name in _TOP:
            stored[f"{_TOP[name]}.weight"] = (name,)
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        suffix = ".bias" if part.endswith(".bias") else ".weight"
        part = part.removesuffix(".bias")
        if part not in held:
            stored[f"blk.{layer}.{names_within_layer[part]}{suffix}"] = (name,)
    for i in range(config.num_layers):
        for whole, parts in fused.items():
            stored[f"blk.{i}.{whole}.weight"] = tuple(layer_name(i, part) for part in parts)
    return stored


def _norm_names(config: ModelConfig) -> dict[str, str]:
    """Names of a layer's norms, which llama.cpp has by what they norm."""
    norms = layer_norms(config)
    names = {
        norms.attention_in: "attn_norm",
        norms.attention_out: "post_attention_norm",
        norms.mlp_in: "ffn_norm",
        norms.mlp_out: "post_ffw_norm",
    }
    return {name: stored for name, stored in names.items() if name is not None}


def rotary_rows(config: ModelConfig, name: str) -> npt.NDArray[np.int64] | None:
    """The order that puts a weight's rows back as Hugging Face has them, or None if they are.

    Where llama.cpp turns neighbouring pairs, GGUF stores each head's q and k rows as (0, h/2, 1,
    h/2 + 1, ...); the graphs rotate halves.
    """
    part = name.removesuffix(".bias").rpartition(".")[2]
    if part not in ("q_proj", "k_proj") or not FORMS[config.architecture].paired_rows:
        return None
    heads = config.num_heads if part == "q_proj" else config.num_kv_heads
    rows = np.arange(heads * config.head_dim)
    return rows.reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
