"""Gemma: a scaled embedding, norms around one, GELU; what Gemma 2 and 3 share with it."""

from __future__ import annotations

import math
from typing import Any

from ortolan.export.families.base import Family
from ortolan.export.settings import Settings

GELU_TANH = "gelu_pytorch_tanh"


def gemma_fields(settings: Settings) -> dict[str, Any]:
    """What every Gemma has.

    The multiplier is that of a model in float32. In bfloat16, transformers rounds it (55.4256
    becomes 55.5), as it rounds everything else.
    """
    if settings.get("head_dim") is None:  # Hugging Face's default is 256, not hidden / heads
        raise settings.unfit("head_dim", None, "a whole number")
    settings.expect("use_bidirectional_attention", False)
    settings.expect("hidden_activation", GELU_TANH)
    bias = settings.flag("attention_bias", False)
    return {
        "embedding_multiplier": math.sqrt(settings.integer("hidden_size")),
        "activation": "gelu_tanh",
        "qkv_bias": bias,
        "attention_out_bias": bias,
    }


FAMILY = Family(
    name="gemma",
    own=lambda settings, layers: gemma_fields(settings),
    tied=True,
    sets_kv_heads=True,
    activations=(GELU_TANH, "gelu"),  # the first published configs say gelu and mean the other
    centred_norms=True,
)
