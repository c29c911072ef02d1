"""Rows that a product computes in pairs: which they are is ONNX Runtime's, and asked of it here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tiny_llama import Shape, write_tiny_gguf

from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.precision import Quantization
from ortolan.graphs.manifest import Manifest
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.opening import open_engine
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.row_pairs import computes_pairs, row_multiple, rows_of_cache
from ortolan.runtime.text.tokenizer import Tokenizer

INPUTS, OUTPUTS, ROWS = 512, 192, 67
COUNTS = (*range(1, 34), 63, 65, 66)


def product(bits: int, block: int) -> ort.InferenceSession:
    """x [rows, INPUTS] -> y [rows, OUTPUTS] by blocks, with activations of 8 bits."""
    rng = np.random.default_rng(0)
    dtype = ml_dtypes.int4 if bits == 4 else np.int8
    most = 2 ** (bits - 1)
    codes = rng.integers(-most, most, (INPUTS, OUTPUTS)).astype(dtype)
    scales = rng.random((INPUTS // block, OUTPUTS), dtype=np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=0, block_size=block),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", INPUTS]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", OUTPUTS]),
    ]
    weights = [numpy_helper.from_array(codes, "w"), numpy_helper.from_array(scales, "s")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    opset = helper.make_opsetid("", 21)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    onnx.checker.check_model(model)
    use_threads(None)
    options = session_options({"session.qdq_matmulnbits_accuracy_level": "4"})
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def manifest_of(bundle: Path, precision: str) -> Manifest:
    """The bundle's, as if all its weights were of that precision."""
    manifest = Manifest.read(bundle)
    groups = [dataclasses.replace(group, precision=precision) for group in manifest.weights]
    return dataclasses.replace(manifest, weights=groups)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_bits_it_has_among_others(bits: int, block: int, tiny_bundle: Path) -> None:
    """An even number of rows, where blocks are said to be computed so, and any elsewhere."""
    pairs = computes_pairs(manifest_of(tiny_bundle, f"int{bits} block {block}"), EngineConfig())
    session = product(bits, block)
    x = np.random.default_rng(1).standard_normal((ROWS + 1, INPUTS), dtype=np.float32)
    (expected,) = session.run(None, {"x": x})
    for count in COUNTS:
        rows = count + count % 2 if pairs else count
        (found,) = session.run(None, {"x": x[:rows]})
        np.testing.assert_array_equal(found, expected[:rows], err_msg=f"{count} rows")


def test_rows_are_paired_only_where_it_matters(tiny_bundle: Path) -> None:
    small, large = (manifest_of(tiny_bundle, f"int4 block {block}") for block in (32, 128))
    for slots, expected in ((1, 1), (2, 2), (5, 2)):
        config = EngineConfig(max_slots=slots)
        assert row_multiple(small, config) == 1
        assert rows_of_cache(small, config) == slots
        assert row_multiple(large, config) == expected
    assert rows_of_cache(large, EngineConfig(max_slots=5)) == 6
    assert rows_of_cache(large, EngineConfig(max_slots=1)) == 1
    for manifest in (small, large):
        assert row_multiple(manifest, EngineConfig(max_slots=1, accuracy="exact")) == 2
    assert not computes_pairs(manifest_of(tiny_bundle, "float32"), EngineConfig())
    assert computes_pairs(manifest_of(tiny_bundle, "int8 block 128 + offsets"), EngineConfig())


def test_scoring_beside_a_running_answer_leaves_it_alone(tiny_bundle: Path) -> None:
    """The row that makes a pair may be in its slot, and must write where it will write next."""
    config = EngineConfig(accuracy="exact", max_slots=2, prefix_cache_mb=0)
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=1, ignore_eos=True)
    prompt = list(range(10, 24))
    answers = []
    for scores in (False, True):
        bundle = Bundle.open(tiny_bundle)
        engine = open_engine(bundle, config, Tokenizer.open(tiny_bundle), checks=True)
        other = engine.submit(Request(prompt[:2], SamplingParams(max_tokens=2, temperature=0)))
        handle = engine.submit(Request(prompt, params))
        while engine.step():
            if scores and other.done:  # its slot, the first, is free
                engine.logits(prompt[3:8], None, decoded_from=2)
        answers.append([(event.token_ids, event.logprobs) for event in handle.events])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("accuracy", ["default", "exact"])
def test_an_odd_last_piece_has_room_for_its_padding(
    accuracy: Literal["default", "exact"], tmp_path: Path
) -> None:
    """Of a context that fills a slot's pages to the last position."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf", shape=Shape(context=64))
    options = ExportOptions(weights="int4", quantization=Quantization(block_size=64))
    export_bundle(str(source), tmp_path / "bundle", options)
    config = EngineConfig(accuracy=accuracy, max_slots=2, prefill_chunk=47, prefix_cache_mb=0)
    bundle = Bundle.open(tmp_path / "bundle")
    engine = open_engine(bundle, config, Tokenizer.open(bundle.path), checks=True)
    assert computes_pairs(bundle.manifest, config)
    handle = engine.submit(Request([5 + i % 40 for i in range(64)], SamplingParams(max_tokens=1)))
    while engine.step():
        pass
    assert handle.error is None
    assert handle.events[-1].finish_reason == "length"
