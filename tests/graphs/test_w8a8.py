"""Products of integers: weights with a scale per output, activations with a scale per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxscript import GraphBuilder

from ortolan.graphs.attention_gqa import GQA
from ortolan.graphs.attention_onnx import ONNX
from ortolan.graphs.decoder import Mlp
from ortolan.graphs.flavor import Flavor
from ortolan.graphs.formats import W8A8, LayerPlan, Projection, plan_layer, weight_shapes
from ortolan.graphs.linear import MICROSOFT, add_linears, apply_linears
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads

INPUTS, OUTPUTS = 70, 48


@pytest.fixture(params=[False, True], ids=["fused", "standard"])
def standard(request: pytest.FixtureRequest) -> bool:
    """Whether the layer has operators of the ONNX standard alone."""
    return bool(request.param)


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weight": rng.integers(-128, 128, (INPUTS, OUTPUTS)).astype(np.int8),
        "weight_scale": (0.01 + rng.random(OUTPUTS)).astype(np.float32),
        "bias": (100 * rng.standard_normal(OUTPUTS)).astype(np.float32),
    }


def session(
    weights: dict[str, np.ndarray],
    save_to: Path | None = None,
    *,
    bias: bool = False,
    standard: bool = False,
) -> ort.InferenceSession:
    """x [batch, chunk, INPUTS] -> y of one W8A8 layer."""
    opsets = {"": 21} if standard else {"": 21, MICROSOFT: 1}
    graph = ir.Graph([], [], nodes=[], name="product", opset_imports=opsets)
    builder = GraphBuilder(graph)
    x = builder.input("x", ir.DataType.FLOAT, ["batch", "chunk", INPUTS])
    owner = add_linears_to_module(builder, x, bias, standard)
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


def add_linears_to_module(
    builder: GraphBuilder, x: ir.Value, bias: bool, standard: bool
) -> ir.Value:
    from onnxscript import nn

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__("owner")
            proj = Projection("owner.proj", ("proj",), INPUTS, (OUTPUTS,), W8A8, bias)
            self.linears = add_linears(self, (proj,), standard=standard)

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


def test_product_is_of_rounded_tokens(weights: dict[str, np.ndarray], standard: bool) -> None:
    """The price that presets state is that of this rounding and no other."""
    x = np.random.default_rng(1).standard_normal((3, 5, INPUTS), dtype=np.float32)
    (found,) = session(weights, standard=standard).run(None, {"x": x})
    np.testing.assert_allclose(found, expected(x, weights), rtol=1e-4, atol=1e-2)


def test_a_bias_is_added_as_it_is(
    weights: dict[str, np.ndarray], standard: bool, tmp_path: Path
) -> None:
    """ONNX Runtime fuses an Add into the product, and then multiplies it by the token's scale.

    Qwen2's q, k and v have biases far larger than what tokens differ by.
    """
    x = np.random.default_rng(1).standard_normal((3, 5, INPUTS), dtype=np.float32)
    run = session(weights, tmp_path / "optimized.onnx", bias=True, standard=standard).run
    (found,) = run(None, {"x": x})
    np.testing.assert_allclose(found, expected(x, weights) + weights["bias"], rtol=1e-4, atol=1e-2)


def test_tokens_do_not_depend_on_those_beside_them(
    weights: dict[str, np.ndarray], standard: bool
) -> None:
    """One scale for all rows, as DynamicQuantizeLinear has it, would break rule 1."""
    x = np.random.default_rng(1).standard_normal((4, 33, INPUTS), dtype=np.float32)
    x[1:] *= 1000
    run = session(weights, standard=standard).run
    (together,) = run(None, {"x": x})
    for row in range(33):
        (alone,) = run(None, {"x": x[:1, row : row + 1]})
        np.testing.assert_array_equal(together[0, row], alone[0, 0])


def test_token_of_zeros_gives_zeros(weights: dict[str, np.ndarray], standard: bool) -> None:
    """Padding may be all zeros; 0 / 0 would spread through the row."""
    (found,) = session(weights, standard=standard).run(
        None, {"x": np.zeros((1, 2, INPUTS), np.float32)}
    )
    np.testing.assert_array_equal(found, 0)


def test_overflow_stays_visible(weights: dict[str, np.ndarray], standard: bool) -> None:
    """Infinite activations must not become plausible logits: the engine looks for them."""
    x = np.ones((1, 2, INPUTS), np.float32)
    x[0, 1, 3] = np.inf
    (found,) = session(weights, standard=standard).run(None, {"x": x})
    assert np.isfinite(found[0, 0]).all()
    assert not np.isfinite(found[0, 1]).any()


def test_product_is_one_node(
    weights: dict[str, np.ndarray], standard: bool, tmp_path: Path
) -> None:
    """Unfused, the weights' scales would cost two more passes over every output."""
    import onnx

    session(weights, tmp_path / "optimized.onnx", standard=standard)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 1
    assert not {"MatMulInteger", "Cast"} & set(kinds)


def mlp_session(config: ModelConfig, plan: LayerPlan, flavor: Flavor) -> ort.InferenceSession:
    """x [batch, chunk, hidden] -> y of one MLP with weights by their shapes."""
    graph = ir.Graph([], [], nodes=[], name="mlp", opset_imports=dict(flavor.opsets))
    builder = GraphBuilder(graph)
    x = builder.input("x", ir.DataType.FLOAT, ["batch", "chunk", config.hidden_size])
    y = Mlp(config, plan, flavor)(builder.op, x)
    y.dtype = ir.DataType.FLOAT
    builder.add_output(y, "y")
    for name, value in graph.initializers.items():
        if value.const_value is None:
            rng = np.random.default_rng(list(name.encode()))
            shape = [int(size) for size in value.shape or ()]
            codes = rng.integers(-127, 128, shape).astype(np.int8)
            scales = (0.001 + 0.01 * rng.random(shape)).astype(np.float32)
            if name.endswith("bias"):
                codes = 10 * rng.standard_normal(shape).astype(np.float32)
            value.const_value = ir.tensor(scales if name.endswith("scale") else codes)
    model = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    use_threads(None)
    return ort.InferenceSession(model, session_options({}), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biases"])
def mlps(request: pytest.FixtureRequest) -> list[ort.InferenceSession]:
    """One whose inner values may count in the tokens' scales, and one of standard operators."""
    config = ModelConfig(
        *("llama", 300, 64, 96, 1, 4, 2, 16, 1e-5, 1e4, 64, True), mlp_bias=request.param
    )
    formats = dict.fromkeys(weight_shapes(config), W8A8)
    plan = plan_layer(config, formats, 0)
    return [mlp_session(config, plan, flavor) for flavor in (GQA, ONNX)]


def test_counting_in_scales_changes_nothing(mlps: list[ort.InferenceSession]) -> None:
    """`up` is not multiplied by the tokens' scales: `down` is, instead."""
    x = np.random.default_rng(1).standard_normal((2, 9, 64), dtype=np.float32)
    x[0] *= 100
    counted, scaled = (mlp.run(None, {"x": x})[0] for mlp in mlps)
    # A number halfway between two codes may fall to either.
    np.testing.assert_allclose(counted, scaled, rtol=1e-5, atol=0.02 * np.abs(scaled[1]).max())
    assert np.abs(scaled[1]).max() > 0


def test_mlp_of_zeros_and_of_overflow(
    mlps: list[ort.InferenceSession], request: pytest.FixtureRequest
) -> None:
    """What is left unscaled must neither hide an infinite token nor make one of zeros."""
    biases = "biases" in request.node.name
    x = np.zeros((1, 3, 64), np.float32)
    x[0, 1] = 1
    x[0, 2, 5] = np.inf
    for mlp in mlps:
        (found,) = mlp.run(None, {"x": x})
        assert np.isfinite(found[0, :2]).all()
        assert not np.allclose(found[0, 0], found[0, 1])
        if not biases:
            np.testing.assert_array_equal(found[0, 0], 0)
        assert not np.isfinite(found[0, 2]).any()
