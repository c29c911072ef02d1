"""The default attention flavor: com.microsoft.GroupQueryAttention with rotary fused in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript import nn

from ortolan.graphs.formats import LayerPlan
from ortolan.graphs.linear import MICROSOFT, add_linears, apply_linears
from ortolan.graphs.manifest import ModelConfig

# What GroupQueryAttention asks of head_dim when it rotates; found when a graph runs, not at load.
HEAD_DIM_MULTIPLE = 16

# GroupQueryAttention's inputs between sin_cache and query_seqlens, all absent here.
_ABSENT_BEFORE_QUERY_SEQLENS = 7


@dataclass(frozen=True)
class AttentionInputs:
    """What every layer's attention reads besides its own past. See graphs/contract.py."""

    seqlens_k: ir.Value
    total_sequence_length: ir.Value
    query_seqlens: ir.Value | None
    cos_table: ir.Value
    sin_table: ir.Value


class GqaAttention(nn.Module):
    """x [batch, chunk, hidden] and the past -> output of the same shape, and the present.

    past and present [batch, kv_heads, capacity, head_dim] are meant to be one buffer.
    """

    def __init__(self, config: ModelConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config = config
        self.qkv = add_linears(self, plan.qkv)
        self.out = add_linears(self, (plan.attention_out,))

    def forward(
        self, op: Any, x: ir.Value, inputs: AttentionInputs, past: tuple[ir.Value, ir.Value]
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        projected: list[ir.Value | None] = list(apply_linears(op, x, self.qkv))
        # Packed q, k and v enter as the query, with no key and value.
        qkv = projected + [None] * (3 - len(projected))
        ragged = []
        if inputs.query_seqlens is not None:
            ragged = [*[None] * _ABSENT_BEFORE_QUERY_SEQLENS, inputs.query_seqlens]
        attended, present_key, present_value = op.GroupQueryAttention(
            *qkv,
            *past,
            inputs.seqlens_k,
            inputs.total_sequence_length,
            inputs.cos_table,
            inputs.sin_table,
            *ragged,
            num_heads=self.config.num_heads,
            kv_num_heads=self.config.num_kv_heads,
            do_rotary=1,
            _domain=MICROSOFT,
            _outputs=3,
        )
        (output,) = apply_linears(op, attended, self.out)
        return output, present_key, present_value
