"""A decoder graph built in float32, turned to compute in another float dtype.

Modules say what is computed, and know one float type. Here all of it changes at once: parameters,
constants, casts. Two things stay float32: scales of an int8 KV cache, since that is what attention
takes, and the logits, by a cast at the end.
"""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (gives numpy bfloat16)
import onnx_ir as ir

from ortolan.graphs.contract import LOGITS, FloatDtype
from ortolan.graphs.linear import ONNX_DTYPES

KV_SCALES = ("k_scale", "v_scale")  # how their names end


def compute_in(graph: ir.Graph, dtype: FloatDtype) -> None:
    """Change the graph in place. Its inputs and present outputs are left as they are declared.

    Its parameters have no tensors yet, and constants are initializers. Requires a first output
    `logits`, which gets a cast to float32.
    """
    if dtype == "float32":
        return
    target = ONNX_DTYPES[dtype]
    for name, value in graph.initializers.items():
        if value.dtype != ir.DataType.FLOAT or name.endswith(KV_SCALES):
            continue
        value.type = ir.TensorType(target)
        if value.const_value is not None:
            array = value.const_value.numpy().astype(target.numpy())
            value.const_value = ir.tensor(array, dtype=target, name=name)
    for node in graph:
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and to.as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", int(target))
        for output in node.outputs:
            # Those of fused operators have no type; what has one was inferred from float32.
            if output.dtype == ir.DataType.FLOAT and not output.is_graph_output():
                output.type = ir.TensorType(target)
    _cast_logits(graph, target)


def _cast_logits(graph: ir.Graph, target: ir.DataType) -> None:
    logits = graph.outputs[0]
    assert logits.name == LOGITS
    computed = logits.producer()
    assert computed is not None
    logits.name = f"{LOGITS}_computed"
    cast = ir.node("Cast", [logits], {"to": int(ir.DataType.FLOAT)}, name="logits/Cast")
    (result,) = cast.outputs
    result.name, result.shape = LOGITS, logits.shape
    result.type = ir.TensorType(ir.DataType.FLOAT)
    logits.type = ir.TensorType(target)
    graph.append(cast)
    graph.outputs[0] = result
