"""Bundles that compute in 16 bits: numbers where a kernel is at hand, structure where none is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from tiny_llama import Shape, write_tiny_gguf

from ortolan.errors import CheckpointError, ProviderError, UsageError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.graphs import contract as c
from ortolan.graphs.manifest import Manifest, ModelConfig
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig, SamplingParams

TYPES: dict[str, Any] = {
    "blocks": {"*": "Q4_1", "token_embd*": "Q8_0"},
    "floats": {"*": "F32", "*attn*": "F16", "*ffn*": "BF16"},
}
IDS = np.random.default_rng(0).integers(3, 299, 24).tolist()
CAPACITY = 64


@pytest.fixture(params=product(TYPES, (True, False)), ids=lambda p: f"{p[0]}-tied={p[1]}")
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    types, tied = request.param
    return write_tiny_gguf(tmp_path / "tiny.gguf", types=TYPES[types], tied=tied)


def exported(source: Path, **options: Any) -> Path:
    bundle = source.with_name("-".join(["bundle", *map(str, options.values())]))
    export_bundle(str(source), bundle, ExportOptions(**options))
    return bundle


def through_engine(bundle: Path) -> np.ndarray:
    with LLM(Bundle.open(bundle), EngineConfig(max_slots=2, accuracy="exact")) as llm:
        llm.generate(IDS, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        return llm.logits(IDS)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("attention", ["gqa", "onnx"])
def test_float16_is_near_to_float32(source: Path, attention: str) -> None:
    """The logits come out in float32, and the engine does not see what was computed in."""
    wide = through_engine(exported(source, attention=attention))
    narrow = through_engine(exported(source, attention=attention, dtype="float16"))
    assert narrow.dtype == np.float32
    assert 1e-5 < difference(narrow, wide) < 0.01


@pytest.mark.parametrize("attention", ["gqa", "onnx"])
def test_bfloat16_graph_is_the_same_model(source: Path, attention: str) -> None:
    """No CPU kernel computes in it, so its graph and weights are taken back to float32."""
    bundle = exported(source, attention=attention, dtype="bfloat16")
    config = Manifest.read(bundle).model
    narrow = prefill(widened(bundle / "prefill.onnx"), bundle, config)
    wide = prefill(
        onnx.load(exported(source, attention=attention) / "prefill.onnx"), bundle, config
    )
    assert 1e-4 < difference(narrow, wide) < 0.05


def widened(path: Path) -> onnx.ModelProto:
    """The graph with every bfloat16 in it, weights included, made float32."""
    model = onnx.load(path)
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            array = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
    return model


def prefill(model: onnx.ModelProto, bundle: Path, config: ModelConfig) -> np.ndarray:
    shape = (1, config.num_kv_heads, CAPACITY, config.head_dim)
    feeds: dict[str, Any] = {
        c.past_name(layer, part): np.zeros(shape, np.float32)
        for layer in range(config.num_layers)
        for part in c.PARTS
    }
    feeds |= {
        c.INPUT_IDS: np.array([IDS], np.int64),
        c.SEQLENS_K: np.array([len(IDS) - 1], np.int32),
        c.TOTAL_SEQUENCE_LENGTH: np.array(len(IDS), np.int32),
        c.LOGITS_INDEX: np.arange(len(IDS), dtype=np.int32)[None],
    }
    use_threads(None)
    options = session_options({"session.qdq_matmulnbits_accuracy_level": "1"})
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run([c.LOGITS], feeds)[0])


def tensors(bundle: Path) -> Iterator[TensorProto]:
    for graph in (c.DECODE, c.PREFILL, c.PREFILL_RAGGED):
        yield from onnx.load(bundle / f"{graph}.onnx", load_external_data=False).graph.initializer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nothing_in_the_graphs_is_float32_but_kv_scales(source: Path, dtype: str) -> None:
    """One operator with both types is refused by every provider, when it is too late."""
    bundle = exported(source, dtype=dtype, kv="int8")
    left = {t.name for t in tensors(bundle) if t.data_type == TensorProto.FLOAT}
    assert all(name.endswith(("k_scale", "v_scale")) for name in left)
    assert len(left) == 2 * 2
    manifest = Manifest.read(bundle)
    assert (manifest.dtypes.activations, manifest.dtypes.kv) == (dtype, "int8")
    stored = {group.precision for group in manifest.weights if group.role != "kv scales"}
    assert "float32" not in stored
    assert dtype in stored


def test_bfloat16_is_refused_on_cpu_by_name(tmp_path: Path) -> None:
    """ONNX Runtime would name an operator of the graph, and no way out."""
    bundle = exported(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype="bfloat16")
    with pytest.raises(ProviderError, match=r"cpu has no kernels for bfloat16.*--dtype float16"):
        LLM(Bundle.open(bundle), EngineConfig())


def test_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    """It would become infinite, and every logit with it."""
    norm = np.full(Shape().hidden, 7e4, np.float32)
    source = write_tiny_gguf(tmp_path / "tiny.gguf", extra={"output_norm.weight": norm})
    with pytest.raises(CheckpointError, match=r"model.norm.weight: 70000 is beyond .*float16"):
        exported(source, dtype="float16")
    assert not list(tmp_path.glob("bundle*"))
    exported(source, dtype="bfloat16")


def test_w8a8_is_refused_in_16_bits(tmp_path: Path) -> None:
    """Its integer products, in the thousands of thousands, do not fit float16."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=r"--dtype float16 is not possible with w8a8"):
        exported(source, dtype="float16", weights="w8a8")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_standard_graphs_pass_the_checker_with_inferred_types(tmp_path: Path, dtype: str) -> None:
    """For standard operators alone, onnx knows every type, and finds two that do not agree."""
    types = {"*": "Q4_1", "token_embd*": "Q8_0"}
    bundle = exported(
        write_tiny_gguf(tmp_path / "t.gguf", types=types), dtype=dtype, attention="onnx"
    )
    shutil.copytree(bundle, tmp_path / "copy")
    for graph in (c.DECODE, c.PREFILL, c.PREFILL_RAGGED):
        onnx.checker.check_model(tmp_path / "copy" / f"{graph}.onnx", full_check=True)
