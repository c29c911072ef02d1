"""The families of models that can be exported, one small file each, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping

from ortolan.export.families import (
    gemma,
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from ortolan.export.families.base import Family, model_config

__all__ = ["FAMILIES", "Family", "model_config"]

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        llama,
        mistral,
        qwen2,
        qwen3,
        phi3,
        smollm3,
        granite,
        gemma,
        gemma2,
        gemma3,
        olmo2,
    )
}
