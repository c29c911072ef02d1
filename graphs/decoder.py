"""The decoder: embedding, layers, final norm, head, as modules named like a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
from onnxscript import nn
from onnxscript.nn import Parameter

from ortolan.graphs.flavor import CallInputs, Flavor
from ortolan.graphs.formats import (
    EMBEDDING,
    EMBEDDING_SCALE,
    FINAL_NORM,
    Formats,
    LayerPlan,
    head_projection,
    layer_norms,
    plan_layer,
)
from ortolan.graphs.linear import add_linears, apply_linears, round_tokens
from ortolan.graphs.manifest import DEFAULT_DTYPES, Dtypes, ModelConfig, RopeName
from ortolan.graphs.rotary import rope_tables

Past = list[tuple[ir.Value, ir.Value]]


def _silu(op: Any, x: ir.Value) -> ir.Value:
    return op.Mul(x, op.Sigmoid(x))


def _gelu_tanh(op: Any, x: ir.Value) -> ir.Value:
    return op.Gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Any, ir.Value], ir.Value]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
}


def _picked(op: Any, x: ir.Value, index: ir.Value, *, one_row: bool) -> ir.Value:
    """x [batch, chunk, hidden] at index [batch, n] -> [batch, n, hidden].

    By operators that need no constant: with one more initializer than decode, ONNX Runtime would
    order prefill's weights otherwise, and the packed files of the two could not be shared.
    one_row: batch is 1; every provider takes this form, and not every one the other.
    """
    if one_row:
        return op.Gather(x, op.Reshape(index, op.Shape(index, start=1)), axis=1)
    index = op.Cast(index, to=ir.DataType.INT64)
    index = op.ConcatFromSequence(op.SequenceConstruct(index), axis=-1, new_axis=1)
    return op.GatherND(x, index, batch_dims=1)


def _softcapped(op: Any, x: ir.Value, cap: float) -> ir.Value:
    """cap * tanh(x / cap); x itself where the cap is 0."""
    return op.Mul(op.Tanh(op.Div(x, cap)), cap) if cap else x


class Mlp(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, flavor: Flavor) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        rows, standard = flavor.rows and plan.affine, flavor.standard
        self.gate_up = add_linears(self, plan.gate_up, rows=rows, standard=standard)
        self.down = add_linears(self, (plan.down,), rows=rows, standard=standard)
        integers = all(projection.format.w8a8 for projection in (*plan.gate_up, plan.down))
        self.counts = integers and not standard and not config.mlp_bias

    def forward(self, op: Any, x: ir.Value) -> ir.Value:
        if self.counts:
            return self._counted(op, x)
        outputs = apply_linears(op, x, self.gate_up)
        if len(outputs) == 1:
            outputs = op.Split(outputs[0], axis=-1, num_outputs=2, _outputs=2)
        gate, up = outputs
        return apply_linears(op, op.Mul(self.activation(op, gate), up), self.down)[0]

    def _counted(self, op: Any, x: ir.Value) -> ir.Value:
        """In integers: what `down` reads counts in the tokens' scales of what `up` read.

        Its codes are the same either way, and `up` is spared a pass over the widest values.
        """
        gate, up = self.gate_up
        tokens = round_tokens(op, x)
        activated = self.activation(op, gate(op, x, tokens=tokens))
        product = op.Mul(activated, up(op, x, tokens=tokens, scaled=False))
        rounded = round_tokens(op, product, unit=tokens.scale)
        result: ir.Value = self.down[0](op, product, tokens=rounded)
        return result


class Layer(nn.Module):
    """One decoder layer; `delta` is what the layer before still has to add to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        layer: int,
        flavor: Flavor,
        dtypes: Dtypes = DEFAULT_DTYPES,
    ) -> None:
        super().__init__()
        self.config = config
        self.norms = layer_norms(config)
        for name in self.norms.names:
            setattr(self, name, flavor.norm(config.hidden_size, config.rms_norm_eps, None))
        self.self_attn = flavor.attention(config, plan, layer, dtypes)
        self.mlp = Mlp(config, plan, flavor)

    def forward(
        self,
        op: Any,
        x: ir.Value,
        delta: ir.Value | None,
        inputs: Any,
        past: tuple[ir.Value, ir.Value],
    ) -> tuple[ir.Value, ir.Value, tuple[ir.Value, ir.Value]]:
        read, x = self._entering(op, self.norms.attention_in, x, delta)
        attended, key, value = self.self_attn(op, read, inputs, past)
        delta = self._leaving(op, self.norms.attention_out, attended)
        read, x = self._entering(op, self.norms.mlp_in, x, delta)
        return x, self._leaving(op, self.norms.mlp_out, self.mlp(op, read)), (key, value)

    def _entering(
        self, op: Any, norm: str | None, x: ir.Value, delta: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """What a branch reads, and the residual with `delta` added."""
        if norm is not None:
            read, x = getattr(self, norm)(op, x, delta)
            return read, x
        x = x if delta is None else op.Add(x, delta)
        return x, x

    def _leaving(self, op: Any, norm: str | None, output: ir.Value) -> ir.Value:
        """What a branch adds to the residual."""
        if norm is not None:
            output, _ = getattr(self, norm)(op, output)
        multiplier = self.config.residual_multiplier
        return output if multiplier == 1.0 else op.Mul(output, multiplier)


class Backbone(nn.Module):
    """ids [batch, chunk] -> hidden states [batch, chunk, hidden] before the final norm."""

    def __init__(
        self, config: ModelConfig, formats: Formats, flavor: Flavor, dtypes: Dtypes
    ) -> None:
        super().__init__("model")
        self.config = config
        self.flavor = flavor
        table = formats[EMBEDDING]
        half = (config.rotary_dim or config.head_dim) // 2
        self.embed_tokens = flavor.embedding(config.vocab_size, config.hidden_size, table)
        self.table_is_scaled = EMBEDDING_SCALE in formats
        if self.table_is_scaled:
            self.embed_scale = Parameter([config.hidden_size])
        for rope in config.ropes:
            for name in rope_tables(rope):
                setattr(self, name, Parameter([config.max_context, half]))
        plans = [plan_layer(config, formats, i) for i in range(config.num_layers)]
        self.rows = flavor.rows and plans[0].affine
        self.layers = nn.ModuleList(
            [Layer(config, plan, i, flavor, dtypes) for i, plan in enumerate(plans)]
        )

    def forward(
        self,
        op: Any,
        ids: ir.Value,
        seqlens_k: ir.Value,
        total_sequence_length: ir.Value,
        query_seqlens: ir.Value | None,
        past: Past,
    ) -> tuple[ir.Value, Past]:
        x = self.embed_tokens(op, ids)
        if self.table_is_scaled:
            x = op.Mul(x, self.embed_scale)
        if self.config.embedding_multiplier != 1.0:
            x = op.Mul(x, self.config.embedding_multiplier)
        call = CallInputs(
            ids,
            seqlens_k,
            total_sequence_length,
            query_seqlens,
            past[0][0],
            {rope: self._tables(rope) for rope in self.config.ropes},
        )
        inputs = self.flavor.prepare(op, self.config, call)
        if self.rows:
            x = op.Reshape(x, [-1, self.config.hidden_size])
        delta: ir.Value | None = None
        present = []
        for layer, layer_past in zip(self.layers, past, strict=True):
            x, delta, layer_present = layer(op, x, delta, inputs, layer_past)
            present.append(layer_present)
        x = op.Add(x, delta)
        if self.rows:
            x = op.Reshape(x, op.Concat(op.Shape(ids), [-1], axis=0))
        return x, present

    def _tables(self, rope: RopeName) -> tuple[ir.Value, ir.Value]:
        cos, sin = (getattr(self, name) for name in rope_tables(rope))
        return cos, sin


class Decoder(nn.Module):
    """The whole model: ids and past -> logits at the wanted positions, and present."""

    def __init__(
        self, config: ModelConfig, formats: Formats, flavor: Flavor, dtypes: Dtypes
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config, formats, flavor, dtypes)
        self.norm = flavor.norm(config.hidden_size, config.rms_norm_eps, FINAL_NORM)
        if config.tie_embeddings:
            self.lm_head = flavor.tied_head(self.model.embed_tokens)
        else:
            head = head_projection(config, formats)
            self.untied = add_linears(self, (head,), standard=flavor.standard)

    def forward(
        self,
        op: Any,
        ids: ir.Value,
        seqlens_k: ir.Value,
        total_sequence_length: ir.Value,
        query_seqlens: ir.Value | None,
        logits_index: ir.Value | None,
        past: Past,
    ) -> tuple[ir.Value, Past]:
        x, present = self.model(op, ids, seqlens_k, total_sequence_length, query_seqlens, past)
        if logits_index is not None:
            # The vocabulary is the widest product: only the wanted rows take part in it.
            x = _picked(op, x, logits_index, one_row=query_seqlens is None)
        normed, _ = self.norm(op, x)
        if self.config.tie_embeddings:
            logits = self.lm_head(op, normed)
        else:
            (logits,) = apply_linears(op, normed, self.untied)
        if self.config.logits_divisor != 1.0:
            logits = op.Div(logits, self.config.logits_divisor)
        return _softcapped(op, logits, self.config.logits_softcap), present
