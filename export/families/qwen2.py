"""Qwen 2 and 2.5: biases on q, k and v."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family, window
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, **window(settings, layers)}


FAMILY = Family(name="qwen2", own=_own, sets_kv_heads=True)
