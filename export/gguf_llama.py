"""What llama.cpp calls architecture `llama`: its settings, tensor names and row order in GGUF."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import CheckpointError, ConfigError
from ortolan.graphs.attention_gqa import HEAD_DIM_MULTIPLE
from ortolan.graphs.formats import EMBEDDING, FINAL_NORM, LM_HEAD
from ortolan.graphs.manifest import ModelConfig

ARCHITECTURE = "llama"

# GGUF's tensor names -> state-dict names, both without ".weight".
TENSOR_NAMES: Mapping[str, str] = {
    "token_embd": EMBEDDING,
    "output_norm": FINAL_NORM,
    "output": LM_HEAD,
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}

# Settings that this file reads, and the values of others that change nothing.
_READ = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
}
_HARMLESS: Mapping[str, Any] = {"rope.scaling.type": "none", "expert_count": 0}


def model_config(file: str, metadata: Mapping[str, Any], *, tied: bool) -> ModelConfig:
    """The model's shape from a GGUF file's metadata.

    Raises ConfigError for another architecture or a setting that is not known here, by its name
    and value; CheckpointError for a setting that is missing or contradicts another.
    """
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ConfigError(
            f"{file}: architecture {architecture!r} is not supported; supported is {ARCHITECTURE!r}"
        )
    settings = {
        key.removeprefix(f"{ARCHITECTURE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{ARCHITECTURE}.")
    }
    for key, value in settings.items():
        if key not in _READ and not (key in _HARMLESS and value == _HARMLESS[key]):
            raise ConfigError(
                f"{file}: setting {ARCHITECTURE}.{key} = {reprlib.repr(value)} is not supported; "
                "ignoring it would change the model"
            )

    def number(key: str, default: float | None = None) -> float:
        value = settings.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return value
        raise _unfit(file, key, value, "a number above 0")

    def integer(key: str, default: int | None = None) -> int:
        value = number(key, default)
        if not isinstance(value, int):
            raise _unfit(file, key, value, "a whole number")
        return value

    tokens = metadata.get("tokenizer.ggml.tokens")
    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    kv_heads = integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{file}: {heads} attention heads cannot share {kv_heads} key-value heads evenly"
        )
    head_dim = integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(key, head_dim) != head_dim:
            raise ConfigError(
                f"{file}: setting {ARCHITECTURE}.{key} = {settings[key]} differs from the head "
                f"size {head_dim}, which is not supported"
            )
    if head_dim % HEAD_DIM_MULTIPLE:
        raise ConfigError(
            f"{file}: head size {head_dim} is not supported; ONNX Runtime's attention with rotary "
            f"embedding takes multiples of {HEAD_DIM_MULTIPLE}"
        )
    num_tokens = len(tokens) if isinstance(tokens, list) else None
    vocab_size = integer("vocab_size", num_tokens)
    if num_tokens is not None and num_tokens > vocab_size:
        raise CheckpointError(
            f"{file}: the tokenizer has {num_tokens} tokens, the model knows {vocab_size}"
        )
    return ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        num_layers=integer("block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        rope_theta=float(number("rope.freq_base", 10000.0)),
        max_context=integer("context_length"),
        tie_embeddings=tied,
    )


def _unfit(file: str, key: str, value: object, expected: str) -> CheckpointError:
    found = reprlib.repr(value)  # may be a list of thousands
    return CheckpointError(f"{file}: setting {ARCHITECTURE}.{key} is {found}, expected {expected}")


def rotary_rows(config: ModelConfig, name: str) -> npt.NDArray[np.int64] | None:
    """The order that puts a weight's rows back as Hugging Face has them, or None if they are.

    GGUF stores each head's q and k rows as interleaved rotary pairs (0, h/2, 1, h/2 + 1, ...);
    the graphs rotate halves.
    """
    part = name.rpartition(".")[2]
    if part not in ("q_proj", "k_proj"):
        return None
    heads = config.num_heads if part == "q_proj" else config.num_kv_heads
    rows = np.arange(heads * config.head_dim)
    return rows.reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
