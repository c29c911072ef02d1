"""The sampling graph: logits in, the likeliest tokens and what their probabilities need out.

It runs where the logits are, so that a device hands over k candidates instead of a vocabulary.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import GraphBuilder, nn

# The oldest pair that holds every operator used here, for the sake of older providers' wheels.
OPSET = 21
IR_VERSION = 10


class Sample(nn.Module):
    """Adjust, mask, take the top k, and sum up the rest; standard operators only."""

    def forward(
        self,
        op: Any,
        logits: ir.Value,
        adjust_ids: ir.Value,
        adjust_scale: ir.Value,
        adjust_bias: ir.Value,
        temperature: ir.Value,
        num_valid: ir.Value,
        k: ir.Value,
    ) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """See `build_sample_graph`; returns its outputs in order."""
        raw = op.GatherElements(logits, adjust_ids, axis=1)  # [batch, m]
        scaled = op.Where(
            op.Greater(raw, 0.0), op.Div(raw, adjust_scale), op.Mul(raw, adjust_scale)
        )
        # The slice masks, in one copy; what follows it can work in place, since nothing else
        # reads it and since the shapes say that it fits. Where() would be a slower mask.
        valid = _of_valid(op.Slice(logits, [0], num_valid, [1]))
        adjusted = _of_valid(
            op.ScatterElements(valid, adjust_ids, op.Add(scaled, adjust_bias), axis=1)
        )

        values, ids = op.TopK(adjusted, k, axis=1, largest=1, sorted=1, _outputs=2)
        largest = op.Slice(values, [0], [1], [1])  # [batch, 1]
        # Subtract first, scale second: near the largest the difference is exact, so that a tiny
        # temperature neither overflows nor blurs what separates the first tokens.
        below = _of_valid(op.Sub(adjusted, largest))
        scaled_down = _of_valid(op.Mul(below, op.Reciprocal(op.Unsqueeze(temperature, [1]))))
        # Softmax, whose largest value is 1 over the sum: ReduceLogSumExp is four times slower, and
        # LogSoftmax, the same bits in every batch, is left to the CPU by WebGPU, to which a whole
        # row would go at every step.
        probs = _of_valid(op.Softmax(scaled_down, axis=1))
        at_largest = op.GatherElements(probs, op.Slice(ids, [0], [1], [1]), axis=1)
        log_sum_exp = op.Neg(op.Log(op.Squeeze(at_largest, [1])))

        return ids, values, op.GatherElements(logits, ids, axis=1), log_sum_exp


def _of_valid(value: ir.Value) -> ir.Value:
    """Declare [batch, num_valid]: ONNX Runtime reuses a buffer only for an equal known shape."""
    value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["batch", "num_valid"])
    return value


def build_sample_graph(vocab_size: int) -> ir.Model:
    """The sampling graph for logits of `vocab_size` columns.

    Inputs
        logits        float32 [batch, vocab_size]
        adjust_ids    int64   [batch, m], each below num_valid, m at least 1
        adjust_scale  float32 [batch, m], above 0
        adjust_bias   float32 [batch, m]
        temperature   float32 [batch], above 0 (a greedy row passes 1)
        num_valid     int64   [1]: ids from here on are never candidates
        k             int64   [1]: number of candidates, 1 to num_valid

    At each adjusted id the logit l becomes (l > 0 ? l / scale : l * scale) + bias. Every
    adjustment starts from the original logits, so repeated entries are harmless; pad a row by
    repeating one of its entries, or one without any by id 0, scale 1 and bias 0.

    Outputs
        candidate_ids         int64   [batch, k]
        candidate_logits      float32 [batch, k], adjusted, descending, ties by lower id
        candidate_raw_logits  float32 [batch, k], the model's own
        log_sum_exp           float32 [batch], log of the sum over valid ids of
                              exp((l - candidate_logits[:, 0]) / temperature)

    A candidate's probability is exp((c - c[0]) / temperature - log_sum_exp): relative to the
    largest logit, since at low temperatures logit / temperature leaves float32 no digits for the
    rest. log_sum_exp is NaN for a row that holds a NaN or +inf, or nothing above -inf.
    On CPU a row's candidates do not depend on the other rows, their number, or k, bit for bit;
    log_sum_exp does in its last bits. (Logits in host memory are not sampled by this graph.)
    """
    graph = ir.Graph([], [], nodes=[], name="sample", opset_imports={"": OPSET})
    builder = GraphBuilder(graph)
    float32, int64 = ir.DataType.FLOAT, ir.DataType.INT64
    inputs = [
        builder.input("logits", float32, ["batch", vocab_size]),
        builder.input("adjust_ids", int64, ["batch", "m"]),
        builder.input("adjust_scale", float32, ["batch", "m"]),
        builder.input("adjust_bias", float32, ["batch", "m"]),
        builder.input("temperature", float32, ["batch"]),
        builder.input("num_valid", int64, [1]),
        builder.input("k", int64, [1]),
    ]
    outputs = Sample()(builder.op, *inputs)
    contract: list[tuple[str, ir.DataType, list[str]]] = [
        ("candidate_ids", int64, ["batch", "k"]),
        ("candidate_logits", float32, ["batch", "k"]),
        ("candidate_raw_logits", float32, ["batch", "k"]),
        ("log_sum_exp", float32, ["batch"]),
    ]
    for value, (name, dtype, shape) in zip(outputs, contract, strict=True):
        value.dtype, value.shape = dtype, ir.Shape(shape)
        builder.add_output(value, name)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="ortolan")
