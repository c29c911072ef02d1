"""From a model's shape and its weights' formats to ONNX models that obey the contract."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnxscript import GraphBuilder

from ortolan.graphs import contract as c
from ortolan.graphs.attention_gqa import GQA
from ortolan.graphs.attention_onnx import ONNX
from ortolan.graphs.decoder import Decoder
from ortolan.graphs.dtype import compute_in
from ortolan.graphs.flavor import Flavor
from ortolan.graphs.formats import Formats
from ortolan.graphs.manifest import DEFAULT_DTYPES, Dtypes, ModelConfig

IR_VERSION = 10  # the newest that onnxruntime 1.24, the oldest provider wheel in use, loads

FLAVORS: Mapping[str, Flavor] = {flavor.name: flavor for flavor in (GQA, ONNX)}

_DTYPES = {
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int8": ir.DataType.INT8,
}


def decoder_contract(
    name: str, config: ModelConfig, dtypes: Dtypes = DEFAULT_DTYPES
) -> c.GraphContract:
    """The contract of one decoder graph for this model."""
    return c.decoder_contract(
        name,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kv_dtype=dtypes.kv,
    )


def build_decoder_graph(
    name: str,
    config: ModelConfig,
    formats: Formats,
    tensors: Mapping[str, ir.TensorProtocol],
    flavor: Flavor = GQA,
    dtypes: Dtypes = DEFAULT_DTYPES,
) -> ir.Model:
    """The `decode`, `prefill` or `prefill_ragged` graph.

    `tensors` holds every parameter by name, usually as references into a weights file. All graphs
    of one model declare the same parameters in the same order: ONNX Runtime's packed files of two
    graphs are then equal, and one serves both.
    Raises KeyError for a missing tensor and ValueError for one of another shape or dtype.
    """
    contract = decoder_contract(name, config, dtypes)
    graph = ir.Graph([], [], nodes=[], name=name, opset_imports=dict(flavor.opsets))
    builder = GraphBuilder(graph)
    values = {
        spec.name: builder.input(spec.name, _DTYPES[spec.dtype], list(spec.shape))
        for spec in contract.inputs
    }
    past = [
        (values[c.past_name(i, "key")], values[c.past_name(i, "value")])
        for i in range(config.num_layers)
    ]
    decoder = Decoder(config, formats, flavor, dtypes)
    logits, present = decoder(
        builder.op,
        values[c.INPUT_IDS],
        values[c.SEQLENS_K],
        values[c.TOTAL_SEQUENCE_LENGTH],
        values.get(c.QUERY_SEQLENS),
        values.get(c.LOGITS_INDEX),
        past,
    )
    results = [logits, *(value for pair in present for value in pair)]
    for value, spec in zip(results, contract.outputs, strict=True):
        value.name = spec.name
        value.type = ir.TensorType(_DTYPES[spec.dtype])
        value.shape = ir.Shape(spec.shape)
        graph.outputs.append(value)
    _drop_unread(graph)
    compute_in(graph, dtypes.activations)
    _attach(graph, tensors)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="ortolan")


def _drop_unread(graph: ir.Graph) -> None:
    """Remove nodes whose outputs nothing reads."""
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def _attach(graph: ir.Graph, tensors: Mapping[str, ir.TensorProtocol]) -> None:
    """Give every parameter its tensor, which must have the shape and dtype it was built for."""
    for name, value in graph.initializers.items():
        if value.const_value is not None:  # a small constant of the graph itself
            continue
        tensor = tensors[name]
        if tuple(value.shape or ()) != tuple(tensor.shape) or value.dtype != tensor.dtype:
            raise ValueError(
                f"{name}: the graph wants {value.dtype} {value.shape}, "
                f"the tensor is {tensor.dtype} {tensor.shape}"
            )
        value.const_value = tensor
