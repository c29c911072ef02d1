"""Granite: multipliers on embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family, biases
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(settings.number("embedding_multiplier", 1.0)),
        "attention_scale": float(settings.number("attention_multiplier", 1.0)),
        "residual_multiplier": float(settings.number("residual_multiplier", 1.0)),
        "logits_divisor": float(settings.number("logits_scaling", 1.0)),
        **biases(settings),
    }


FAMILY = Family(name="granite", own=_own)
