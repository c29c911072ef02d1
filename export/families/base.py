"""What the families of Llama-style models share, read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ortolan.errors import CheckpointError
from ortolan.export.rope import read_rope
from ortolan.export.settings import Settings
from ortolan.graphs.manifest import ModelConfig

# Settings that describe training, loading or sampling, and change no logit.
_HARMLESS = (
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "model_type",
    "name",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",  # cuts products into parts, and adds them up again
    "resid_pdrop",
    "return_dict",
    "sep_token_id",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)


# Far above any that exists; a damaged number must not make tables of gigabytes.
_LARGEST_HEAD = 4096


@dataclass(frozen=True)
class Family:
    """Models that one config class of Hugging Face describes.

    own: reads what differs from plain Llama and returns fields of ModelConfig that replace the
    common ones. fused: a stored matrix -> the weights that it holds, one after another.
    tied: whether the embedding is the head too where the config does not say; defaults differ.
    theta: rope's base, likewise. sets_kv_heads: a config without num_key_value_heads does not mean
    one per attention head, so it is refused. activations: accepted values of `hidden_act`.
    centred_norms: norms multiply by 1 + weight. window_theta: rope's base in layers with a window
    where the config does not say; None for families in which all layers have one base.
    partial_rotary: whether transformers reads `partial_rotary_factor` for the family.
    """

    name: str
    own: Callable[[Settings, int], Mapping[str, Any]] = field(default=lambda settings, layers: {})
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied: bool = False
    theta: float = 10000.0
    sets_kv_heads: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    centred_norms: bool = False
    window_theta: float | None = None
    partial_rotary: bool = False


def check_heads(settings: Settings, heads: int, kv_heads: int) -> None:
    """Raises CheckpointError if query heads do not divide among the key-value heads."""
    if heads % kv_heads:
        raise CheckpointError(
            f"{settings.where}: {heads} attention heads cannot share {kv_heads} key-value heads "
            "evenly"
        )


def model_config(family: Family, settings: Settings, requested_context: int | None) -> ModelConfig:
    """The model's shape.

    Raises ConfigError for a setting that is not known, by its name and value, however deep in the
    config; CheckpointError for one that is missing or contradicts another.
    """
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    layers = settings.integer("num_hidden_layers")
    kv_heads = settings.integer("num_key_value_heads", None if family.sets_kv_heads else heads)
    check_heads(settings, heads, kv_heads)
    if settings.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"{settings.where}: hidden_size {hidden} does not divide among {heads} heads"
        )
    head_dim = settings.integer("head_dim", hidden // heads)
    if head_dim > _LARGEST_HEAD:
        raise settings.unsupported("head_dim", head_dim)
    rope = read_rope(settings, head_dim, requested_context, family.theta, family.window_theta)
    if rope.rotary_dim != head_dim and not family.partial_rotary:
        raise settings.unsupported("partial_rotary_factor", rope.rotary_dim / head_dim)
    settings.expect("hidden_act", *family.activations)
    settings.expect("quantization_config")
    settings.expect("rope_interleaved", False)
    settings.expect("use_mrope", False)
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
        "tie_embeddings": settings.flag("tie_word_embeddings", family.tied),
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


def window(
    settings: Settings, layers: int, default: Callable[[int], bool] | None = None
) -> dict[str, Any]:
    """Sliding windows as Qwen and SmolLM write them: a switch, a size, and a kind per layer.

    default: whether a layer has a window where the config lists no kinds; None takes Qwen's
    rule, all layers from max_window_layers on.
    """
    used = settings.flag("use_sliding_window", False)
    size = settings.get("sliding_window")
    first = settings.get("max_window_layers")
    if first is not None and (isinstance(first, bool) or not isinstance(first, int) or first < 0):
        raise settings.unfit("max_window_layers", first, "a number of layers")
    first = 28 if first is None else first  # Hugging Face's default
    listed = settings.get("layer_types")
    if not used or size is None:
        if listed is not None and "sliding_attention" in layer_kinds(settings, layers):
            raise settings.unsupported("layer_types", "sliding_attention")  # of no size in use
        return {}
    if listed is None:
        windowed = [default(i) if default else i >= first for i in range(layers)]
    else:
        windowed = [kind == "sliding_attention" for kind in layer_kinds(settings, layers)]
    return {"sliding_window": settings.integer("sliding_window"), "window_layers": windowed}


def layer_kinds(settings: Settings, layers: int) -> list[str]:
    """`layer_types`, of which full and sliding attention are known."""
    kinds = settings.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise settings.unfit("layer_types", kinds, f"a list of {layers} kinds")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise settings.unsupported("layer_types", kind)
    return kinds
