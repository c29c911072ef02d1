"""Bytes in the weights file, as onnx and ONNX Runtime read them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortolan.export.weights import Weight
from ortolan.export.weights_file import WeightsFile, pack_int4
from ortolan.export.write_weights import unsigned_rows
from ortolan.graphs.formats import WeightFormat
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads

VOCAB, HIDDEN, BLOCK = 40, 96, 32


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(-8, 7), min_size=1, max_size=65))
def test_int4_packing_is_onnx_raw_data(codes: list[int]) -> None:
    """Read by onnx's own helper, odd counts included."""
    packed = pack_int4(np.array(codes, np.int8))
    tensor = TensorProto(
        dims=[len(codes)], data_type=TensorProto.INT4, raw_data=packed.tobytes(), name="codes"
    )
    assert numpy_helper.to_array(tensor).astype(np.int8).tolist() == codes


def quantized(bits: int, seed: int = 0) -> Weight:
    rng = np.random.default_rng(seed)
    half = 1 << (bits - 1)
    codes = rng.integers(-half, half, (VOCAB, HIDDEN), dtype=np.int8)
    codes[0, :2] = -half, half - 1
    scale = rng.standard_normal((VOCAB, HIDDEN // BLOCK)).astype(np.float32)
    return Weight(WeightFormat("int4" if bits == 4 else "int8", BLOCK), codes, scale)


def run_node(
    node: onnx.NodeProto, feed: dict[str, np.ndarray], weights: dict[str, np.ndarray]
) -> np.ndarray:
    """One contrib operator in ONNX Runtime, weights as constants."""
    types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(k, types[v.dtype], v.shape) for k, v in feed.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    use_threads(None)
    session = ort.InferenceSession(
        model.SerializeToString(), session_options({}), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, feed)[0])


@pytest.mark.parametrize("bits", [4, 8])
def test_gathered_rows_are_the_dequantized_ones(bits: int) -> None:
    """GatherBlockQuantized finds each code where `unsigned_rows` put it."""
    weight = quantized(bits)
    assert weight.scale is not None
    node = helper.make_node(
        "GatherBlockQuantized",
        ["table", "ids", "scale"],
        ["y"],
        domain="com.microsoft",
        bits=bits,
        block_size=BLOCK,
        quantize_axis=1,
        gather_axis=0,
    )
    ids = np.array([[0, 39, 7]])
    found = run_node(node, {"ids": ids}, {"table": unsigned_rows(weight), "scale": weight.scale})
    np.testing.assert_array_equal(found, weight.dequantized()[ids])


@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_bytes_multiply_as_the_dequantized_matrix(bits: int) -> None:
    """A tied head reads the embedding's bytes as MatMulNBits, in another shape."""
    weight = quantized(bits)
    assert weight.scale is not None
    blocks = HIDDEN // BLOCK
    node = helper.make_node(
        "MatMulNBits",
        ["x", "table", "scale"],
        ["y"],
        domain="com.microsoft",
        K=HIDDEN,
        N=VOCAB,
        bits=bits,
        block_size=BLOCK,
        accuracy_level=1,
    )
    table = unsigned_rows(weight).reshape(VOCAB, blocks, BLOCK * bits // 8)
    x = np.random.default_rng(1).standard_normal((1, 5, HIDDEN)).astype(np.float32)
    found = run_node(node, {"x": x}, {"table": table, "scale": weight.scale})
    expected = x.astype(np.float64) @ weight.dequantized().astype(np.float64).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_tensors_are_read_back_from_where_the_references_point(tmp_path: Path) -> None:
    """onnx_ir reads every reference; offsets and lengths have to agree with the bytes."""
    rng = np.random.default_rng(0)
    arrays = {
        "odd": rng.integers(-8, 8, (3, 5), dtype=np.int8),
        "large": rng.standard_normal((200, 100)).astype(np.float32),
        "small": rng.standard_normal(7).astype(np.float32),
        "bytes": rng.integers(0, 256, (4, 6), dtype=np.uint8),
    }
    dtypes = {"odd": ir.DataType.INT4, "bytes": ir.DataType.UINT8}
    with WeightsFile(tmp_path / "weights.bin") as file:
        for name, array in arrays.items():
            size = file.add(name, array, dtypes.get(name, ir.DataType.FLOAT))
            assert size == (8 if name == "odd" else array.nbytes)
        file.add_view("again", "bytes", (2, 3, 4))
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.tensors[name].numpy(), array)
    np.testing.assert_array_equal(file.tensors["again"].numpy(), arrays["bytes"].reshape(2, 3, 4))
    assert file.tensors["again"].offset == file.tensors["bytes"].offset
    assert file.tensors["large"].offset == 4096
    data = (tmp_path / "weights.bin").read_bytes()
    assert (file.entry.size, file.entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_arrays_that_are_not_contiguous_are_written_in_their_own_order(tmp_path: Path) -> None:
    """Projections are written as transposes."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    with WeightsFile(tmp_path / "weights.bin") as file:
        file.add("transposed", array, ir.DataType.FLOAT)
        file.add("int4", array.astype(np.int8) % 8, ir.DataType.INT4)
    np.testing.assert_array_equal(file.tensors["transposed"].numpy(), array)
    np.testing.assert_array_equal(file.tensors["int4"].numpy(), array % 8)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    """Two writers in one folder would mix their bytes."""
    (tmp_path / "weights.bin").write_bytes(b"old")
    with pytest.raises(FileExistsError), WeightsFile(tmp_path / "weights.bin"):
        pass
    assert (tmp_path / "weights.bin").read_bytes() == b"old"
