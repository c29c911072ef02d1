"""Gemma 3, its text model: head norms, and layers with a window turn by a theta of their own."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family
from ortolan.export.families.gemma import GELU_TANH
from ortolan.export.families.gemma2 import gemma2_fields, softcap
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    settings.expect("attn_logit_softcapping")  # transformers reads it, and does not use it
    period = settings.integer("sliding_window_pattern", 6)
    if settings.get("layer_types") is None:
        settings.expect("_sliding_window_pattern", period)
    settings.ignore("_sliding_window_pattern")  # what listed kinds were made from
    return {
        **gemma2_fields(settings, layers, period),
        "qk_norm": True,
        "logits_softcap": softcap(settings, "final_logit_softcapping", 0.0),
    }


FAMILY = Family(
    name="gemma3_text",
    own=_own,
    tied=True,
    theta=1_000_000.0,
    window_theta=10_000.0,
    sets_kv_heads=True,
    activations=(GELU_TANH,),
    centred_norms=True,
)
