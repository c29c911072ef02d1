"""What the products of a model with offsets are made of."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxscript import GraphBuilder

from ortolan.graphs.linear import row_block_sums
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads


@pytest.mark.parametrize("inputs", [64, 70, 1100])
def test_block_sums_of_rows(inputs: int) -> None:
    """A last block may be shorter: what is missing must add nothing."""
    graph = ir.Graph([], [], nodes=[], name="sums", opset_imports={"": 21})
    builder = GraphBuilder(graph)
    x = builder.input("x", ir.DataType.FLOAT, ["rows", inputs])
    sums = row_block_sums(builder.op, x, inputs, 32)
    sums.dtype = ir.DataType.FLOAT
    builder.add_output(sums, "sums")
    use_threads(None)
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(model, session_options({}), providers=["CPUExecutionProvider"])
    values = np.random.default_rng(0).standard_normal((3, inputs), dtype=np.float32)
    (found,) = session.run(None, {"x": values})
    expected = np.add.reduceat(values.astype(np.float64), np.arange(0, inputs, 32), axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
