"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    if not settings.has("sliding_window"):
        return {"sliding_window": 4096}  # Hugging Face's default; only a null means none
    if settings.get("sliding_window") is None:
        return {}
    return {"sliding_window": settings.integer("sliding_window")}


FAMILY = Family(name="mistral", own=_own, sets_kv_heads=True)
