"""OLMo 2: norms after attention and MLP, not before, and one over all heads of q and of k."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    bias = settings.flag("attention_bias", False)
    return {
        "pre_norms": False,
        "post_norms": True,
        "qk_norm": True,
        "qk_norm_joint": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
    }


FAMILY = Family(name="olmo2", own=_own)
