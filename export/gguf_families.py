"""What llama.cpp's form of each family has of its own. The families are in families/."""

from __future__ import annotations

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
}
