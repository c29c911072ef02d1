"""Phi 3 and 4: q, k, v and gate, up stored as one matrix each; longrope."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    for switch in ("attention_bias", "lm_head_bias", "mlp_bias"):
        settings.expect(switch, False)
    for factor in ("full_attn_mod", "interpolate_factor"):
        settings.expect(factor, 1)
    if settings.get("sliding_window") is None:
        return {}
    return {"sliding_window": settings.integer("sliding_window")}


FAMILY = Family(
    name="phi3",
    own=_own,
    partial_rotary=True,
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
