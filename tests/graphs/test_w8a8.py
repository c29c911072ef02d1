"""Products of integers: weights with a scale per output, activations with a scale per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxscript import GraphBuilder

from ortolan.graphs.formats import W8A8, Projection
from ortolan.graphs.linear import add_linears, apply_linears
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads

INPUTS, OUTPUTS = 70, 48


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weight": rng.integers(-128, 128, (INPUTS, OUTPUTS)).astype(np.int8),
        "weight_scale": (0.01 + rng.random(OUTPUTS)).astype(np.float32),
        "bias": (100 * rng.standard_normal(OUTPUTS)).astype(np.float32),
    }


def session(
    weights: dict[str, np.ndarray], save_to: Path | None = None, *, bias: bool = False
) -> ort.InferenceSession:
    """x [batch, chunk, INPUTS] -> y of one W8A8 layer."""
    graph = ir.Graph([], [], nodes=[], name="product", opset_imports={"": 21})
    builder = GraphBuilder(graph)
    x = builder.input("x", ir.DataType.FLOAT, ["batch", "chunk", INPUTS])
    owner = add_linears_to_module(builder, x, bias)
    owner.dtype = ir.DataType.FLOAT
    builder.add_output(owner, "y")
    for name, value in graph.initializers.items():
        if value.const_value is None:
            value.const_value = ir.tensor(weights[name.rpartition(".")[2]])
    use_threads(None)
    options = session_options({})
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def add_linears_to_module(builder: GraphBuilder, x: ir.Value, bias: bool) -> ir.Value:
    from onnxscript import nn

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__("owner")
            proj = Projection("owner.proj", ("proj",), INPUTS, (OUTPUTS,), W8A8, bias)
            self.linears = add_linears(self, (proj,))

        def forward(self, op: object, x: ir.Value) -> ir.Value:
            return apply_linears(op, x, self.linears)[0]

    result: ir.Value = Owner()(builder.op, x)
    return result


def expected(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """The formula by hand, in float64 behind the codes."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    codes = np.rint(x / scale)
    product = codes.astype(np.int64) @ weights["weight"].astype(np.int64)
    return np.asarray(product * scale.astype(np.float64) * weights["weight_scale"])


def test_product_is_of_rounded_tokens(weights: dict[str, np.ndarray]) -> None:
    """The price that presets state is that of this rounding and no other."""
    x = np.random.default_rng(1).standard_normal((3, 5, INPUTS), dtype=np.float32)
    (found,) = session(weights).run(None, {"x": x})
    np.testing.assert_allclose(found, expected(x, weights), rtol=1e-4, atol=1e-2)


def test_a_bias_is_added_as_it_is(weights: dict[str, np.ndarray], tmp_path: Path) -> None:
    """ONNX Runtime fuses an Add into the product, and then multiplies it by the token's scale.

    Qwen2's q, k and v have biases far larger than what tokens differ by.
    """
    x = np.random.default_rng(1).standard_normal((3, 5, INPUTS), dtype=np.float32)
    (found,) = session(weights, tmp_path / "optimized.onnx", bias=True).run(None, {"x": x})
    np.testing.assert_allclose(found, expected(x, weights) + weights["bias"], rtol=1e-4, atol=1e-2)


def test_tokens_do_not_depend_on_those_beside_them(weights: dict[str, np.ndarray]) -> None:
    """One scale for all rows, as DynamicQuantizeLinear has it, would break rule 1."""
    x = np.random.default_rng(1).standard_normal((4, 33, INPUTS), dtype=np.float32)
    x[1:] *= 1000
    run = session(weights).run
    (together,) = run(None, {"x": x})
    for row in range(33):
        (alone,) = run(None, {"x": x[:1, row : row + 1]})
        np.testing.assert_array_equal(together[0, row], alone[0, 0])


def test_token_of_zeros_gives_zeros(weights: dict[str, np.ndarray]) -> None:
    """Padding may be all zeros; 0 / 0 would spread through the row."""
    (found,) = session(weights).run(None, {"x": np.zeros((1, 2, INPUTS), np.float32)})
    np.testing.assert_array_equal(found, 0)


def test_overflow_stays_visible(weights: dict[str, np.ndarray]) -> None:
    """Infinite activations must not become plausible logits: the engine looks for them."""
    x = np.ones((1, 2, INPUTS), np.float32)
    x[0, 1, 3] = np.inf
    (found,) = session(weights).run(None, {"x": x})
    assert np.isfinite(found[0, 0]).all()
    assert not np.isfinite(found[0, 1]).any()


def test_product_is_one_node(weights: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Unfused, the scales would cost two more passes over every output."""
    import onnx

    session(weights, tmp_path / "optimized.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 1
    assert not {"MatMulInteger", "Cast"} & set(kinds)
