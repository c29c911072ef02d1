"""What the products of a model with offsets are made of."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxscript import GraphBuilder

from ortolan.graphs import linear
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads


def row_sums_graph(inputs: int, block_size: int, times: int = 1) -> onnx.ModelProto:
    graph = ir.Graph([], [], nodes=[], name="sums", opset_imports={"": 21})
    builder = GraphBuilder(graph)
    x = builder.input("x", ir.DataType.FLOAT, ["rows", inputs])
    for index in range(times):
        sums = linear.row_block_sums(builder.op, x, inputs, block_size)
        sums.dtype = ir.DataType.FLOAT
        builder.add_output(sums, f"sums{index}")
    return ir.to_proto(ir.Model(graph, ir_version=10))


@pytest.mark.parametrize("by_product", [True, False])
@pytest.mark.parametrize("inputs", [64, 70, 1100])
def test_block_sums_of_rows(by_product: bool, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways add up the same inputs, those of a last block that is shorter too."""
    monkeypatch.setattr(linear, "_SUMS_BY_PRODUCT", inputs if by_product else 0)
    use_threads(None)
    model = row_sums_graph(inputs, 32).SerializeToString()
    session = ort.InferenceSession(model, session_options({}), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((3, inputs), dtype=np.float32)
    (found,) = session.run(None, {"x": x})
    expected = np.add.reduceat(x.astype(np.float64), np.arange(0, inputs, 32), axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_block_members_are_one_value_of_a_graph() -> None:
    """Ninety products share it; one each would be read from memory ninety times a step."""
    kinds = Counter(node.op_type for node in row_sums_graph(64, 32, times=3).graph.node)
    assert (kinds["OneHot"], kinds["MatMul"]) == (1, 3)
