"""The default attention flavor: com.microsoft.GroupQueryAttention with rotary fused in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript import nn
from onnxscript.nn import Parameter

from ortolan.graphs.embedding import Embedding, TiedHead
from ortolan.graphs.flavor import CallInputs, Flavor
from ortolan.graphs.formats import LayerPlan, qk_norm_sizes
from ortolan.graphs.linear import MICROSOFT, add_linears, apply_linears
from ortolan.graphs.manifest import Dtypes, ModelConfig

# GroupQueryAttention's inputs that are absent here: position_ids and attention_bias between
# sin_cache and head_sink; q's and k's norms between v_scale and query_seqlens.
_BEFORE_SINK = 2
_BEFORE_QUERY_SEQLENS = 2


@dataclass(frozen=True)
class GqaInputs(CallInputs):
    """What all layers share besides.

    per_row: the shape [batch, chunk, -1], in which rows enter GroupQueryAttention. sink: a
    head_sink, or None.
    """

    per_row: ir.Value
    sink: ir.Value | None


def prepare(op: Any, config: ModelConfig, call: CallInputs) -> GqaInputs:
    """The call's inputs, and what all layers share."""
    per_row = op.Concat(op.Shape(call.ids), [-1], axis=0)
    assert call.ids.shape is not None
    sink = None
    if call.past.dtype == ir.DataType.INT8:
        sink = _sink_of_nothing(op, call.seqlens_k, config.num_heads)
        if call.ids.shape[1] != 1:
            # Made all the same, and dropped with what nobody reads: nodes are numbered, constants
            # that ONNX Runtime folds are named after nodes, and shared files want equal names.
            sink = None
    return GqaInputs(**vars(call), per_row=per_row, sink=sink)


def _sink_of_nothing(op: Any, lengths: ir.Value, num_heads: int) -> ir.Value:
    """A head_sink [num_heads] of -inf, made of any integers [batch]; it adds nothing to a softmax.

    With one, ONNX Runtime's attention does not go over the cache in tiles. Over int8 that makes a
    step of single tokens up to a quarter faster (docs/performance.md), and prompts slower.
    It is computed, by operators that need no constant: with an initializer that prefill has not,
    the packed files of the two could not be shared.
    """
    zero = op.ReduceMin(op.Sub(lengths, lengths))  # [1]
    nothing = op.Log(op.Cast(zero, to=ir.DataType.FLOAT))
    return op.Concat(*[nothing] * num_heads, axis=0)


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension; with `delta`, of x + delta.

    Returns the normed value and the sum, so that the residual addition costs no pass of its own.
    """

    def __init__(self, size: int, epsilon: float, name: str | None = None) -> None:
        super().__init__(name)
        self.epsilon = epsilon
        self.weight = Parameter([size])

    def forward(
        self, op: Any, x: ir.Value, delta: ir.Value | None = None
    ) -> tuple[ir.Value, ir.Value]:
        if delta is None:
            normed = op.SimplifiedLayerNormalization(
                x, self.weight, axis=-1, epsilon=self.epsilon, stash_type=1
            )
            return normed, x
        normed, _, _, total = op.SkipSimplifiedLayerNormalization(
            x, delta, self.weight, epsilon=self.epsilon, _domain=MICROSOFT, _outputs=4
        )
        return normed, total


class HeadNorm(nn.Module):
    """Root-mean-square norm of each `size` numbers, a head or all: x [batch, chunk, width]."""

    def __init__(self, size: int, width: int, epsilon: float) -> None:
        super().__init__()
        self.size = size
        self.width = width
        self.epsilon = epsilon
        self.weight = Parameter([size])

    def forward(self, op: Any, x: ir.Value) -> ir.Value:
        split = op.Reshape(x, [0, 0, self.width // self.size, self.size])
        normed = op.SimplifiedLayerNormalization(
            split, self.weight, axis=-1, epsilon=self.epsilon, stash_type=1
        )
        return op.Reshape(normed, [0, 0, self.width])


def _without_absent_end(inputs: list[ir.Value | None]) -> list[ir.Value | None]:
    """The inputs up to the last one that there is."""
    while inputs and inputs[-1] is None:
        inputs = inputs[:-1]
    return inputs


class GqaAttention(nn.Module):
    """x [batch, chunk, hidden] and the past -> output of the same shape, and the present.

    A model with offsets has x [batch * chunk, hidden] instead.

    past and present [batch, kv_heads, capacity, head_dim] are meant to be one buffer. Where they
    are int8, keys and values are rounded before they are attended to, those of the chunk too, so
    that no cut of a prompt shows.
    """

    def __init__(self, config: ModelConfig, plan: LayerPlan, layer: int, dtypes: Dtypes) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.rows = plan.affine
        self.qkv = add_linears(self, plan.qkv, rows=self.rows)
        if config.qk_norm:
            q_size, k_size = qk_norm_sizes(config)
            q_width, kv_width = (
                heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
            )
            self.q_norm = HeadNorm(q_size, q_width, config.rms_norm_eps)
            self.k_norm = HeadNorm(k_size, kv_width, config.rms_norm_eps)
        self.out = add_linears(self, (plan.attention_out,), rows=self.rows)
        self.kv_codes = dtypes.kv == "int8"
        if self.kv_codes:
            shape = [config.num_kv_heads, 1, config.head_dim]
            self.k_scale, self.v_scale = Parameter(shape), Parameter(shape)

    def forward(
        self, op: Any, x: ir.Value, inputs: GqaInputs, past: tuple[ir.Value, ir.Value]
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        projected: list[ir.Value | None] = list(apply_linears(op, x, self.qkv))
        if self.rows:
            projected = [op.Reshape(rows, inputs.per_row) for rows in projected]
        if self.config.qk_norm:
            projected = self._normed(op, projected)
        # Packed q, k and v enter as the query, with no key and value.
        qkv = projected + [None] * (3 - len(projected))
        turns = self.config.layer_turns(self.layer)
        tables = inputs.ropes[self.config.layer_rope(self.layer)] if turns else (None, None)
        attributes: dict[str, float | int | str] = {"do_rotary": int(turns)}
        if window := self.config.layer_window(self.layer):
            attributes["local_window_size"] = window
        if self.config.attention_scale is not None:
            attributes["scale"] = self.config.attention_scale
        if self.config.attention_softcap:
            attributes["softcap"] = self.config.attention_softcap
        scales: tuple[ir.Value | None, ir.Value | None] = (None, None)
        if self.kv_codes:
            scales = self.k_scale, self.v_scale
            attributes |= {
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": 8,
            }
        optional = [
            *[None] * _BEFORE_SINK,
            inputs.sink,
            *scales,
            *[None] * _BEFORE_QUERY_SEQLENS,
            inputs.query_seqlens,
        ]
        attended, present_key, present_value = op.GroupQueryAttention(
            *qkv,
            *past,
            inputs.seqlens_k,
            inputs.total_sequence_length,
            *tables,
            *_without_absent_end(optional),
            num_heads=self.config.num_heads,
            kv_num_heads=self.config.num_kv_heads,
            **attributes,
            _domain=MICROSOFT,
            _outputs=3,
        )
        if self.rows:
            attended = op.Reshape(attended, [-1, self.config.num_heads * self.config.head_dim])
        (output,) = apply_linears(op, attended, self.out)
        return output, present_key, present_value

    def _normed(self, op: Any, projected: list[ir.Value | None]) -> list[ir.Value | None]:
        """q and k normed, which takes them apart where they are packed."""
        if len(projected) == 1:
            q_width = self.config.num_heads * self.config.head_dim
            kv_width = self.config.num_kv_heads * self.config.head_dim
            sizes = op.Constant(value_ints=[q_width, kv_width, kv_width])
            projected = op.Split(projected[0], sizes, axis=-1, _outputs=3)
        q, k, v = projected
        return [self.q_norm(op, q), self.k_norm(op, k), v]


GQA = Flavor(
    name="gqa",
    opsets={"": 21, MICROSOFT: 1},  # the oldest with 4-bit types and blocked DequantizeLinear
    # What GroupQueryAttention asks when it rotates; found when a graph runs, not at load.
    head_dim_multiple=16,
    signed_table=False,
    kv_dtypes=frozenset({"float32", "float16", "bfloat16", "int8"}),
    rows=True,
    standard=False,
    norm=Norm,
    prepare=prepare,
    attention=GqaAttention,
    embedding=Embedding,
    tied_head=TiedHead,
)
