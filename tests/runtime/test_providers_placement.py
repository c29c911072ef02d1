"""Where nodes land, and what counts as compute."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from tiny_llama import write_tiny_gguf

from ortolan.errors import ProviderError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.runtime.engine import placement as engine_placement
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import load_provider
from ortolan.runtime.providers.graph_bytes import graph_nodes
from ortolan.runtime.providers.placement import check_placement, left_to_cpu, place, summed

# What a graph of ours may do with shapes and lengths alone.
ARITHMETIC = {
    *("Add", "And", "Cast", "Concat", "ConcatFromSequence", "Constant", "Div", "Expand"),
    *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul", "Range", "Reshape"),
    *("SequenceConstruct", "Shape", "Squeeze", "Sub", "Unsqueeze"),
}


@pytest.fixture(scope="module", params=["gqa", "onnx"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placement")
    types = {"*": "Q4_0", "*norm*": "F32"}
    source = write_tiny_gguf(folder / "tiny.gguf", types=types)
    export_bundle(str(source), folder / "bundle", ExportOptions(attention=request.param))
    return folder / "bundle"


@pytest.mark.parametrize("graph", ["decode", "prefill", "prefill_ragged", "sample"])
def test_nodes_are_those_that_the_onnx_package_reads(bundle: Path, graph: str) -> None:
    """Our reader of the bytes has another to agree with."""
    content = (bundle / f"{graph}.onnx").read_bytes()
    nodes = graph_nodes(content)
    theirs = onnx.load_from_string(content).graph.node
    assert [(node.name, node.op) for node in nodes] == [
        (node.name, node.op_type) for node in theirs
    ]


@pytest.mark.parametrize("graph", ["decode", "prefill", "prefill_ragged", "sample"])
def test_all_but_arithmetic_on_shapes_is_compute(bundle: Path, graph: str) -> None:
    """A product or an attention that --strict lets pass would be the one that matters."""
    nodes = graph_nodes((bundle / f"{graph}.onnx").read_bytes())
    rest = {node.op for node in nodes if not node.compute}
    assert rest <= ARITHMETIC
    if graph == "sample":
        assert not rest
    else:
        kinds = {node.op for node in nodes if node.compute}
        assert {"MatMul", "DequantizeLinear", "Sigmoid", "Mul", "Split"} <= kinds
        assert kinds & {"GroupQueryAttention", "Attention"}
        assert kinds & {"GatherBlockQuantized", "Gather"}


@pytest.mark.parametrize("damage", [b"", b"\x3a", b"\x3a\xff\xff", b"\x07", b"\x3a\x05\x0a\x09abc"])
def test_bytes_that_are_no_graph_are_refused(damage: bytes) -> None:
    with pytest.raises(ValueError, match=r"graph|protobuf"):
        graph_nodes(damage)


def subgraph(provider: str, *nodes: tuple[str, str]) -> Any:
    """As ONNX Runtime reports it."""
    found = [SimpleNamespace(name=name, op_type=op) for name, op in nodes]
    return SimpleNamespace(ep_name=provider, get_nodes=lambda: found)


def model() -> bytes:
    """x -> MatMul -> Add, and a Shape beside."""
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    ports = [helper.make_tensor_value_info(name, kind, [2, 2]) for name in "xz"]
    shape = helper.make_tensor_value_info("s", onnx.TensorProto.INT64, [2])
    nodes = [
        helper.make_node("MatMul", ["x", "x"], ["y"], name="product"),
        helper.make_node("Add", ["y", "x"], ["z"], name="sum"),
        helper.make_node("Shape", ["y"], ["s"], name="shape"),
    ]
    graph = helper.make_graph(nodes, "g", [ports[0]], [ports[1], shape])
    return bytes(helper.make_model(graph).SerializeToString())


def test_what_nobody_has_is_the_providers() -> None:
    """WebGPU does not report its own nodes."""
    placed = place(model(), [subgraph("CPUExecutionProvider", ("sum", "Add"))], "WebGpu")
    assert {one.provider: [node.name for node in one.nodes] for one in placed} == {
        "WebGpu": ["product", "shape"],
        "CPUExecutionProvider": ["sum"],
    }
    assert left_to_cpu(placed, "WebGpu") == {"Add": 1}


def test_shapes_on_the_cpu_are_no_fall_back() -> None:
    placed = place(model(), [subgraph("CPUExecutionProvider", ("shape", "Shape"))], "WebGpu")
    assert left_to_cpu(placed, "WebGpu") == {}


def test_node_that_onnx_runtime_has_made_counts_as_compute() -> None:
    """Nothing is known of it, and strict means strict."""
    placed = place(model(), [subgraph("CPUExecutionProvider", ("fused", "FusedMatMul"))], "WebGpu")
    assert left_to_cpu(placed, "WebGpu") == {"FusedMatMul": 1}


def check(provider: str, session: Any, *, strict: bool = False) -> None:
    from dataclasses import replace

    chosen = replace(load_provider(provider), strict=strict)
    check_placement(Path("decode.onnx"), session, model(), chosen, "9.9")


def session_of(*nodes: tuple[str, str]) -> Any:
    """A session that has these nodes on the CPU."""
    found = [subgraph("CPUExecutionProvider", *nodes)]
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: found)


def test_strict_refuses_compute_on_the_cpu() -> None:
    """An operator of a service wants the device that was paid for, or an error."""
    with pytest.raises(ProviderError, match=r"webgpu leaves 1 compute nodes to the CPU \(MatMul 1"):
        check("webgpu", session_of(("product", "MatMul")), strict=True)
    check("webgpu", session_of(("shape", "Shape")), strict=True)
    check("cpu", session_of(("product", "MatMul")), strict=True)  # that is what was asked for


def test_fall_back_to_another_memory_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Two copies in every step; where the memory is the same, a line for who looks for it."""
    caplog.set_level(logging.INFO)
    check("webgpu", session_of(("product", "MatMul")))
    check("openvino", session_of(("product", "MatMul")))
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"]
    assert caplog.records[0].operators == "MatMul 1"  # type: ignore[attr-defined]


def test_old_runtime_cannot_be_strict() -> None:
    """It does not say where nodes landed, so nobody may rely on it."""
    with pytest.raises(ProviderError, match=r"--strict needs onnxruntime 1\.24 or later.*9\.9"):
        check("webgpu", SimpleNamespace(), strict=True)
    check("webgpu", SimpleNamespace())


def test_everything_is_on_the_cpu_provider(bundle: Path) -> None:
    """Against the real ONNX Runtime: all nodes, and none of them is said to fall back."""
    ort_name, placements = engine_placement.graph_placements(bundle, EngineConfig(strict=True))
    assert ort_name == "CPUExecutionProvider"
    assert set(placements) == {"decode", "prefill_ragged", "sample"}
    for placed in placements.values():
        assert [one.provider for one in placed] == [ort_name]
        assert left_to_cpu(placed, ort_name) == {}


def test_long_lists_are_cut_short() -> None:
    counts = {"A": 5, "B": 4, "C": 3, "D": 2, "E": 1, "F": 1}
    assert summed(counts) == "A 5, B 4, C 3, D 2 and 2 more kinds"
    assert summed({"A": 1}) == "A 1"
