"""The attention flavor of standard operators alone, opset 24: portable, and a reference.

RMSNormalization, RotaryEmbedding, TensorScatter into the cache, Attention over it. It keeps the
contract of the default flavor and takes any even head_dim. It is slower: attention copies the
used part of the cache at every step, and a tied quantized head expands its table (embedding_onnx).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript import nn
from onnxscript.nn import Parameter

from ortolan.graphs.embedding_onnx import OnnxEmbedding, OnnxTiedHead
from ortolan.graphs.flavor import CallInputs, Flavor
from ortolan.graphs.formats import LayerPlan, qk_norm_sizes
from ortolan.graphs.linear import add_linears, apply_linears
from ortolan.graphs.manifest import Dtypes, ModelConfig, RopeName

# Attention reads this many positions at a time, up to the capacity. A multiple of a vector
# register's width many times over: a sum over more positions, all masked, has the same bits then,
# so that a row does not depend on how long others are.
_KV_STEP = 64


@dataclass(frozen=True)
class Written:
    """Where a right-padded chunk goes in the cache, for each row.

    The window of `chunk` positions that is written begins at the row's past or, where that would
    pass the capacity, earlier. position: the window's [batch, 1, chunk, 1]; source: which of the
    chunk's tokens each takes; fresh: whether it takes one at all, and is not left as it was.
    """

    start: ir.Value
    position: ir.Value
    source: ir.Value
    fresh: ir.Value


@dataclass(frozen=True)
class OnnxInputs:
    """What all layers share, computed once per call.

    positions [batch, chunk]; start [batch]: tokens before the chunk; total [batch]: with it;
    kv_end [1]: positions that attention reads; masks: window -> what a query sees, [batch, 1,
    chunk, kv_end], absent where being causal says it all.
    """

    positions: ir.Value
    start: ir.Value
    total: ir.Value
    kv_end: ir.Value
    masks: dict[int, ir.Value]
    written: Written | None
    ropes: Mapping[RopeName, tuple[ir.Value, ir.Value]]


def prepare(op: Any, config: ModelConfig, call: CallInputs) -> OnnxInputs:
    """Positions, lengths and masks from the contract's inputs.

    What only some graphs have must bring no constant of its own: ONNX Runtime's packed files of
    two graphs are equal only where both hold the same ones, in the same order.
    """
    chunk = op.Shape(call.ids, start=1, end=2)  # [1]
    capacity = op.Shape(call.past, start=2, end=3)
    total = op.Add(op.Cast(call.seqlens_k, to=ir.DataType.INT64), [1])
    ragged = call.query_seqlens is not None
    start = op.Sub(total, op.Cast(call.query_seqlens, to=ir.DataType.INT64) if ragged else chunk)
    steps = op.Range(0, op.Squeeze(chunk, [0]), 1)
    positions = op.Add(op.Unsqueeze(start, [-1]), steps)  # [batch, chunk]

    longest = op.Reshape(op.Cast(call.total_sequence_length, to=ir.DataType.INT64), [-1])
    rounded = op.Mul(op.Div(op.Add(longest, [_KV_STEP - 1]), [_KV_STEP]), [_KV_STEP])
    kv_end = op.Min(rounded, capacity)

    masks = {}
    key = op.Range(0, op.Squeeze(kv_end, [0]), 1)
    query = _over_heads(op, positions)
    for window in sorted({config.layer_window(i) for i in range(config.num_layers)}):
        if not window and not ragged:
            continue  # Attention's own rule: the last token of the chunk is the last in the cache
        seen = op.LessOrEqual(key, query)
        if window:
            seen = op.And(seen, op.Greater(key, op.Sub(query, [window])))
        masks[window] = seen

    written = None
    if ragged:
        first, end = op.Unsqueeze(start, [-1]), op.Unsqueeze(total, [-1])
        window_start = op.Min(start, op.Sub(capacity, chunk))
        columns = op.Add(op.Unsqueeze(window_start, [-1]), steps)  # [batch, chunk]
        fresh = op.And(op.GreaterOrEqual(columns, first), op.Less(columns, end))
        source = op.Max(op.Sub(columns, first), [0])
        shaped = (_over_heads(op, x) for x in (columns, source, fresh))
        written = Written(window_start, *shaped)
        # Padding has a position too, which may lie beyond the tables: it takes the last token's.
        positions = op.Min(positions, op.Sub(end, [1]))
    return OnnxInputs(positions, start, total, kv_end, masks, written, call.ropes)


def _over_heads(op: Any, x: ir.Value) -> ir.Value:
    """[batch, chunk] -> [batch, 1, chunk, 1]."""
    return op.Unsqueeze(op.Unsqueeze(x, [1]), [-1])


class OnnxNorm(nn.Module):
    """Root-mean-square norm over the last dimension; with `delta`, of x + delta.

    Returns the normed value and the sum.
    """

    def __init__(self, size: int, epsilon: float, name: str | None = None) -> None:
        super().__init__(name)
        self.epsilon = epsilon
        self.weight = Parameter([size])

    def forward(
        self, op: Any, x: ir.Value, delta: ir.Value | None = None
    ) -> tuple[ir.Value, ir.Value]:
        total = x if delta is None else op.Add(x, delta)
        normed = op.RMSNormalization(total, self.weight, axis=-1, epsilon=self.epsilon)
        return normed, total


class OnnxAttention(nn.Module):
    """x [batch, chunk, hidden] and the past -> output of the same shape, and the present.

    past and present [batch, kv_heads, capacity, head_dim] are meant to be one buffer:
    TensorScatter then writes in place.
    """

    def __init__(self, config: ModelConfig, plan: LayerPlan, layer: int, dtypes: Dtypes) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.qkv = add_linears(self, plan.qkv, standard=True)
        if config.qk_norm:
            q_size, k_size = qk_norm_sizes(config)
            self.q_norm = OnnxNorm(q_size, config.rms_norm_eps)
            self.k_norm = OnnxNorm(k_size, config.rms_norm_eps)
        self.out = add_linears(self, (plan.attention_out,), standard=True)

    def forward(
        self, op: Any, x: ir.Value, inputs: OnnxInputs, past: tuple[ir.Value, ir.Value]
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        config = self.config
        q, k, v = self._heads(op, apply_linears(op, x, self.qkv))
        if config.layer_turns(self.layer):
            q, k = self._turned(op, q, inputs), self._turned(op, k, inputs)
        present_key = self._updated(op, past[0], k, inputs)
        present_value = self._updated(op, past[1], v, inputs)
        mask = inputs.masks.get(config.layer_window(self.layer))
        scale = config.attention_scale
        attended = op.Attention(
            q,
            op.Slice(present_key, [0], inputs.kv_end, [2]),
            op.Slice(present_value, [0], inputs.kv_end, [2]),
            mask,
            None,
            None,
            inputs.total,
            is_causal=int(mask is None),
            scale=config.head_dim**-0.5 if scale is None else scale,
            softcap=config.attention_softcap,  # 0, the operator's default, for none
        )
        joined = op.Reshape(
            op.Transpose(attended, perm=[0, 2, 1, 3]), [0, 0, config.num_heads * config.head_dim]
        )
        (output,) = apply_linears(op, joined, self.out)
        return output, present_key, present_value

    def _heads(self, op: Any, projected: list[ir.Value]) -> list[ir.Value]:
        """q, k and v apart, normed if they are, as [batch, heads, chunk, head_dim]."""
        config = self.config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        if len(projected) == 1:
            sizes = [n * config.head_dim for n in heads]
            projected = op.Split(projected[0], sizes, axis=-1, _outputs=3)
        if config.qk_norm_joint:
            projected = self._normed(op, projected)
        split = [
            op.Reshape(x, [0, 0, n, config.head_dim]) for x, n in zip(projected, heads, strict=True)
        ]
        if config.qk_norm and not config.qk_norm_joint:
            split = self._normed(op, split)
        return [op.Transpose(x, perm=[0, 2, 1, 3]) for x in split]

    def _normed(self, op: Any, qkv: Sequence[ir.Value]) -> list[ir.Value]:
        q, k, v = qkv
        return [self.q_norm(op, q)[0], self.k_norm(op, k)[0], v]

    def _turned(self, op: Any, x: ir.Value, inputs: OnnxInputs) -> ir.Value:
        partial = self.config.rotary_dim not in (0, self.config.head_dim)
        attributes = {"rotary_embedding_dim": self.config.rotary_dim} if partial else {}
        tables = inputs.ropes[self.config.layer_rope(self.layer)]
        return op.RotaryEmbedding(x, *tables, inputs.positions, **attributes)

    def _updated(self, op: Any, past: ir.Value, new: ir.Value, inputs: OnnxInputs) -> ir.Value:
        written = inputs.written
        if written is None:
            return op.TensorScatter(past, new, inputs.start, axis=2)
        # Padding must not be written: the window may begin before the row's past does.
        shape = op.Shape(new)
        kept = op.GatherElements(past, op.Expand(written.position, shape), axis=2)
        moved = op.GatherElements(new, op.Expand(written.source, shape), axis=2)
        return op.TensorScatter(past, op.Where(written.fresh, moved, kept), written.start, axis=2)


ONNX = Flavor(
    name="onnx",
    opsets={"": 24},
    head_dim_multiple=2,
    signed_table=True,
    kv_dtypes=frozenset({"float32", "float16", "bfloat16"}),
    rows=False,
    standard=True,
    norm=OnnxNorm,
    prepare=prepare,
    attention=OnnxAttention,
    embedding=OnnxEmbedding,
    tied_head=OnnxTiedHead,
)
