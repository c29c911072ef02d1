"""What llama.cpp's form of each family has of its own. The families are in families/."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ortolan.export.settings import Settings

# Tensors that a bias may belong to, where a family has Llama's switches for them.
_ANY_BIAS = ("attn_q", "attn_output", "ffn_down")


@dataclass(frozen=True)
class Gguf:
    """How llama.cpp stores a family.

    own: reads what differs from plain Llama and returns fields of ModelConfig.
    paired_rows: rows of q and k are stored as interleaved rotary pairs, not as halves.
    biases: tensors that may have one; see gguf_model.py.
    fused: a stored matrix, by GGUF's name, -> the weights that it holds, one after another.
    """

    own: Callable[[Settings, int], Mapping[str, Any]] = field(default=lambda settings, layers: {})
    paired_rows: bool = False
    biases: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _window(settings: Settings, layers: int) -> dict[str, Any]:
    """One sliding window for all layers; 0 stands for none."""
    if settings.get("attention.sliding_window") in (None, 0):
        return {}
    return {"sliding_window": settings.integer("attention.sliding_window")}


def _smollm3(settings: Settings, layers: int) -> dict[str, Any]:
    # The file does not say; llama.cpp leaves out every fourth, as the published models do.
    return {"rope_layers": [(i + 1) % 4 != 0 for i in range(layers)]}


def _granite(settings: Settings, layers: int) -> dict[str, Any]:
    turns = settings.flag("rope.scaling.finetuned", True)  # here, whether it turns at all
    scale = settings.get("attention.scale")
    return {
        "embedding_multiplier": float(settings.number("embedding_scale", 1.0)),
        "attention_scale": None if scale is None else float(settings.number("attention.scale")),
        "residual_multiplier": float(settings.number("residual_scale", 1.0)),
        "logits_divisor": float(settings.number("logit_scale")),
        "rope_layers": None if turns else [False] * layers,
    }


def _gemma(settings: Settings, layers: int) -> dict[str, Any]:
    # One is added to norms already.
    return {
        "embedding_multiplier": math.sqrt(settings.integer("embedding_length")),
        "activation": "gelu_tanh",
    }


def _gemma_from_2(settings: Settings, layers: int, period: int, largest: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. largest: layers of the model with another scale of scores.

    The file says neither; llama.cpp goes by the number of layers, too.
    """
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    head_dim = settings.integer("attention.key_length", hidden // heads)
    pattern = settings.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(type(windowed) is bool for windowed in pattern):
            expected = f"a number or a list of {layers} flags"
            raise settings.unfit("attention.sliding_window_pattern", pattern, expected)
    else:
        period = settings.integer("attention.sliding_window_pattern", period)
        pattern = [(i + 1) % period != 0 for i in range(layers)]
    return {
        **_gemma(settings, layers),
        "post_norms": True,
        "attention_scale": (hidden // heads if layers == largest else head_dim) ** -0.5,
        "sliding_window": settings.integer("attention.sliding_window"),
        "window_layers": pattern,
    }


def _gemma2(settings: Settings, layers: int) -> dict[str, Any]:
    return {
        **_gemma_from_2(settings, layers, period=2, largest=46),
        "attention_softcap": float(settings.number("attn_logit_softcapping", 50.0)),
        "logits_softcap": float(settings.number("final_logit_softcapping", 30.0)),
    }


def _gemma3(settings: Settings, layers: int) -> dict[str, Any]:
    settings.expect("rope.scaling.type", "none", "linear")  # of layers without a window alone
    theta = float(settings.number("rope.freq_base_swa", 10000.0))
    if theta <= 1:
        raise settings.unfit("rope.freq_base_swa", theta, "a number above 1")
    return {
        **_gemma_from_2(settings, layers, period=6, largest=62),
        "qk_norm": True,
        "window_rope_theta": theta,
    }


def _olmo2(settings: Settings, layers: int) -> dict[str, Any]:
    # With a window, the file is an OLMo 3: refused, since nobody reads that setting.
    return {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_joint": True}


# By general.architecture, which equals Hugging Face's model_type. Mistral is stored as llama: a
# window, where a file has one, is Mistral's. Rows are paired where the converter's class derives
# from LlamaModel. llama.cpp reads phi3's window and leaves it out; the models are trained with it.
# Source: llama.cpp's converters and its llama_model_rope_type.
FORMS: Mapping[str, Gguf] = {
    "llama": Gguf(own=_window, paired_rows=True, biases=_ANY_BIAS),
    "qwen2": Gguf(own=lambda settings, layers: {"qkv_bias": True}, biases=("attn_q",)),
    "qwen3": Gguf(own=lambda settings, layers: {"qk_norm": True}),
    "phi3": Gguf(
        own=_window,
        fused={
            "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
    "smollm3": Gguf(own=_smollm3, paired_rows=True, biases=_ANY_BIAS),
    "granite": Gguf(own=_granite, paired_rows=True, biases=_ANY_BIAS),
    "gemma": Gguf(own=_gemma),
    "gemma2": Gguf(own=_gemma2),
    "gemma3": Gguf(own=_gemma3),
    "olmo2": Gguf(own=_olmo2),
}
