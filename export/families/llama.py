"""Llama 1 to 3.x, and what has its architecture: TinyLlama, SmolLM2 and many more."""

from __future__ import annotations

from ortolan.export.families.base import Family, biases

FAMILY = Family(name="llama", own=lambda settings, layers: biases(settings))
