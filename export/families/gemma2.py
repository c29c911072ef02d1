"""Gemma 2: norms around attention and MLP, capped scores and logits, a window in every other layer.

Gemma 3 shares the norms and the windows.
"""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family, layer_kinds
from ortolan.export.families.gemma import GELU_TANH, gemma_fields
from ortolan.export.settings import Settings


def gemma2_fields(settings: Settings, layers: int, period: int) -> dict[str, Any]:
    """period: where no kinds are listed, every layer of that number has no window."""
    scalar = settings.number("query_pre_attn_scalar", 256)
    return {
        **gemma_fields(settings),
        "pre_norms": True,
        "post_norms": True,
        "attention_scale": scalar**-0.5,
        **_windows(settings, layers, period),
    }


def _windows(settings: Settings, layers: int, period: int) -> dict[str, Any]:
    if settings.get("layer_types") is None:
        windowed = [(i + 1) % period != 0 for i in range(layers)]
    else:
        windowed = [kind == "sliding_attention" for kind in layer_kinds(settings, layers)]
    if not any(windowed):
        settings.ignore("sliding_window")
        return {}
    return {"sliding_window": settings.integer("sliding_window"), "window_layers": windowed}


def softcap(settings: Settings, key: str, default: float) -> float:
    """A cap, 0 for a null; the default where the key is absent."""
    if not settings.has(key):
        return default
    return 0.0 if settings.get(key) is None else float(settings.number(key))


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    # Some published configs say the window's size twice.
    settings.expect("sliding_window_size", settings.get("sliding_window"))
    return {
        **gemma2_fields(settings, layers, period=2),
        "attention_softcap": softcap(settings, "attn_logit_softcapping", 50.0),
        "logits_softcap": softcap(settings, "final_logit_softcapping", 30.0),
    }


FAMILY = Family(
    name="gemma2",
    own=_own,
    tied=True,
    sets_kv_heads=True,
    activations=(GELU_TANH,),
    centred_norms=True,
)
