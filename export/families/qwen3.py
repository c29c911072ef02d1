"""Qwen 3: a norm on every head of q and k."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family, window
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    if settings.get("head_dim") is None:  # Hugging Face's default is not hidden / heads here
        raise settings.unfit("head_dim", None, "a whole number")
    bias = settings.flag("attention_bias", False)
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        **window(settings, layers),
    }


FAMILY = Family(name="qwen3", own=_own, sets_kv_heads=True)
