"""What the families of Llama-style models share, read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.rope import read_rope
from ortolan.export.settings import Settings
from ortolan.graphs.attention_gqa import HEAD_DIM_MULTIPLE
from ortolan.graphs.manifest import ModelConfig

# Settings that describe training, loading or sampling, and change no logit.
_HARMLESS = (
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "label2id",
    "max_window_layers",  # layer_types says what it comes to
    "model_type",
    "name",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "resid_pdrop",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
)


@dataclass(frozen=True)
class Family:
    """Models that one config class of Hugging Face describes.

    own: reads what differs from plain Llama and returns fields of ModelConfig that replace the
    common ones. fused: a stored matrix -> the weights that it holds, one after another.
    """

    name: str
    own: Callable[[Settings, int], Mapping[str, Any]] = field(default=lambda settings, layers: {})
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def model_config(family: Family, settings: Settings, requested_context: int | None) -> ModelConfig:
    """The model's shape.

    Raises ConfigError for a setting that is not known, by its name and value, however deep in the
    config; CheckpointError for one that is missing or contradicts another.
    """
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    layers = settings.integer("num_hidden_layers")
    kv_heads = settings.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{settings.where}: {heads} attention heads cannot share {kv_heads} key-value heads "
            "evenly"
        )
    if settings.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"{settings.where}: hidden_size {hidden} does not divide among {heads} heads"
        )
    head_dim = settings.integer("head_dim", hidden // heads)
    rope = read_rope(settings, head_dim, requested_context)
    for name, size in (("head_dim", head_dim), ("rotated part of head_dim", rope.rotary_dim)):
        if size % HEAD_DIM_MULTIPLE:
            raise ConfigError(
                f"{settings.where}: {name} {size} is not supported; ONNX Runtime's attention with "
                f"rotary embedding takes multiples of {HEAD_DIM_MULTIPLE}"
            )
    settings.expect("hidden_act", "silu", "swish")
    settings.expect("pretraining_tp", 1)
    settings.expect("quantization_config")
    settings.ignore(*_HARMLESS)
    fields: dict[str, Any] = {
        "architecture": family.name,
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(settings.number("rms_norm_eps")),
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        **rope.fields(),
        **family.own(settings, layers),
    }
    settings.finish()
    return ModelConfig(**fields)


def biases(settings: Settings) -> dict[str, bool]:
    """Llama's switches for biases."""
    attention = settings.flag("attention_bias", False)
    mlp = settings.flag("mlp_bias", False)
    return {"qkv_bias": attention, "attention_out_bias": attention, "mlp_bias": mlp}


def window(settings: Settings, layers: int) -> dict[str, Any]:
    """Sliding windows as Qwen and SmolLM write them: a switch, a size, and a kind per layer."""
    used = settings.flag("use_sliding_window", False)
    size = settings.get("sliding_window")
    kinds = layer_kinds(settings, layers)
    if not used and "sliding_attention" not in kinds:
        return {}
    if size is None:
        raise settings.unfit("sliding_window", None, "a number of positions")
    return {
        "sliding_window": settings.integer("sliding_window"),
        "window_layers": [kind == "sliding_attention" for kind in kinds],
    }


def layer_kinds(settings: Settings, layers: int) -> list[str]:
    """`layer_types`, of which full and sliding attention are known; all full if absent."""
    kinds = settings.get("layer_types")
    if kinds is None:
        return ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise settings.unfit("layer_types", kinds, f"a list of {layers} kinds")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise settings.unsupported("layer_types", kind)
    return kinds
