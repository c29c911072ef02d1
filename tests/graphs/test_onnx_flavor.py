"""The `onnx` attention flavor: standard operators alone, and the same model."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator
from reference_llama import ReferenceLlama
from tiny_hf import config, write_folder
from tiny_llama import Shape, write_tiny_gguf

import ortolan
from ortolan.errors import ConfigError
from ortolan.export.exporter import AttentionChoice, ExportOptions, export_bundle
from ortolan.graphs import contract as c
from ortolan.graphs.manifest import WEIGHTS_NAME, Manifest
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads

IDS = [2, 99, 7, 7, 120, 45, 0, 100, 31, 88, 5, 64, 17, 90, 99, 3, 50, 12, 77]
DECODERS = (c.DECODE, c.PREFILL, c.PREFILL_RAGGED)
TOLERANCE = 1e-5  # of the largest logit; both flavors compute in float32

# Tensor types, and whether the head is the embedding's table.
CASES: dict[str, tuple[Any, bool]] = {
    "tied-float16": ("F16", True),
    "tied-int8-table": ({"*": "Q4_1", "token_embd*": "Q8_0"}, True),
    "tied-int4-table": ("Q4_0", True),
    "tied-int4-table-with-offsets": ("Q4_1", True),
    "untied-mixed": ({"*": "Q4_1", "*attn_v*": "BF16", "*ffn_up*": "Q8_0"}, False),
}
# Families that ask more of the operators than Llama: caps, windows, two kinds of rope, norms.
ARCH = Path(__file__).parents[1] / "data" / "arch"
FAMILIES = ("gemma2", "gemma3", "olmo2")
Kv = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=[*CASES, *FAMILIES])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in FAMILIES:
        return shutil.copytree(ARCH / request.param, folder / "model")
    types, tied = CASES[request.param]
    return write_tiny_gguf(folder / "tiny.gguf", types=types, tied=tied)


def exported(source: Path, folder: Path, attention: AttentionChoice = "onnx") -> Path:
    export_bundle(str(source), folder / attention, ExportOptions(attention=attention))
    return folder / attention


@pytest.fixture(scope="module")
def bundle(source: Path) -> Path:
    """Read it, never write into it."""
    return exported(source, source.parent)


def empty_kv(bundle: Path, batch: int = 1, capacity: int = 32) -> Kv:
    """Not zeros: what lies beyond a row's length must never be read."""
    m = Manifest.read(bundle).model
    shape = (batch, m.num_kv_heads, capacity, m.head_dim)
    names = itertools.product(range(m.num_layers), c.PARTS)
    return {c.past_name(i, part): np.full(shape, 1e3, np.float32) for i, part in names}


def feeds(graph: str, ids: list[list[int]], past: list[int]) -> dict[str, np.ndarray]:
    """The contract's inputs besides the past; rows are padded, logits wanted everywhere."""
    chunk = max(map(len, ids))
    totals = [n + len(row) for n, row in zip(past, ids, strict=True)]
    values: dict[str, np.ndarray] = {
        c.INPUT_IDS: np.array([row + [0] * (chunk - len(row)) for row in ids], np.int64),
        c.SEQLENS_K: np.array(totals, np.int32) - np.int32(1),
        c.TOTAL_SEQUENCE_LENGTH: np.array(max(*totals, chunk), np.int32),
    }
    if graph != c.DECODE:
        values[c.LOGITS_INDEX] = np.tile(np.arange(chunk, dtype=np.int32), (len(ids), 1))
    if graph == c.PREFILL_RAGGED:
        values[c.QUERY_SEQLENS] = np.array([len(row) for row in ids], np.int32)
    return values


def open_session(path: Path, level: int) -> ort.InferenceSession:
    """At that accuracy level; 1 is float32 arithmetic, a tied head's own node included."""
    use_threads(None)
    exact = path.with_suffix(".exact.onnx")
    exact.write_bytes(
        path.read_bytes().replace(b"accuracy_level\x18\x04", b"accuracy_level\x18" + bytes([level]))
    )
    options = session_options({"session.qdq_matmulnbits_accuracy_level": str(level)})
    return ort.InferenceSession(exact, options, providers=["CPUExecutionProvider"])


class Graphs:
    """A bundle's graphs; `run` gives logits and replaces the past by the present."""

    def __init__(self, bundle: Path, level: int = 1) -> None:
        self.sessions = {name: open_session(bundle / f"{name}.onnx", level) for name in DECODERS}

    def run(self, graph: str, kv: Kv, ids: list[list[int]], past: list[int]) -> np.ndarray:
        outputs = self.sessions[graph].run(None, {**feeds(graph, ids, past), **kv})
        kv.update(zip(kv, outputs[1:], strict=True))
        return np.asarray(outputs[0])


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < tolerance, f"logits are off by {error:.2e} of the largest"


@pytest.mark.parametrize("graph", c.GRAPH_NAMES)
def test_only_standard_operators_pass_the_full_checker(bundle: Path, graph: str) -> None:
    """The flavor exists for runtimes that know the standard and nothing else."""
    model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
    assert {node.domain for node in model.graph.node} == {""}
    (opset,) = model.opset_import
    assert opset.domain == ""
    assert opset.version == (21 if graph == c.SAMPLE else 24)
    assert model.ir_version == 10
    onnx.checker.check_model(bundle / f"{graph}.onnx", full_check=True)


def test_manifest_says_the_flavor_and_the_table_is_stored_once(source: Path, bundle: Path) -> None:
    """A quantized table that a head expands must not be kept expanded."""
    other = exported(source, source.parent, "gqa")
    found, expected = Manifest.read(bundle), Manifest.read(other)
    assert (found.attention, expected.attention) == ("onnx", "gqa")
    assert found.weights == expected.weights
    assert (bundle / WEIGHTS_NAME).stat().st_size == (other / WEIGHTS_NAME).stat().st_size


def test_logits_and_kv_equal_the_default_flavor(source: Path, tmp_path: Path) -> None:
    """Whole, in chunks, ragged, and decoding rows of different lengths."""
    kinds: tuple[AttentionChoice, ...] = ("onnx", "gqa")
    results: list[tuple[list[np.ndarray], Kv]] = []
    for attention in kinds:
        folder = exported(source, tmp_path, attention)
        graphs, kv, two = Graphs(folder), empty_kv(folder), empty_kv(folder, batch=2)
        logits = [
            graphs.run(c.PREFILL, kv, [IDS[:9]], [0]),
            graphs.run(c.PREFILL, kv, [IDS[9:14]], [9]),
            graphs.run(c.DECODE, kv, [IDS[14:15]], [14]),
            graphs.run(c.PREFILL_RAGGED, two, [IDS[:5], IDS[:2]], [0, 0])[0],
            graphs.run(c.PREFILL_RAGGED, two, [IDS[5:8], IDS[2:8]], [5, 2])[1],
            graphs.run(c.DECODE, two, [[IDS[8]], [IDS[8]]], [8, 8]),
        ]
        valid = {k: v[:, :, :15] for k, v in kv.items()}
        results.append((logits, valid | {f"two.{k}": v[:, :, :9] for k, v in two.items()}))
    for found, expected in zip(*(logits for logits, _ in results), strict=True):
        assert_close(found, expected)
    for name, array in results[0][1].items():
        np.testing.assert_allclose(array, results[1][1][name], rtol=0, atol=1e-4)


def test_onnx_reference_agrees(source: Path, bundle: Path) -> None:
    """Someone else's reading of every operator: prefill, then a decode step on its cache."""
    kv, own = empty_kv(bundle, capacity=16), empty_kv(bundle, capacity=16)
    graphs = Graphs(exported(source, source.parent / "agrees"))
    for graph, ids, past in ((c.PREFILL, IDS[:6], 0), (c.DECODE, IDS[6:7], 6)):
        evaluator = ReferenceEvaluator(onnx.load(bundle / f"{graph}.onnx"))
        outputs: list[Any] = list(evaluator.run(None, {**feeds(graph, [ids], [past]), **kv}))
        kv.update(zip(kv, outputs[1:], strict=True))
        assert_close(graphs.run(graph, own, [ids], [past]), outputs[0])


@pytest.mark.parametrize("capacity", [192, 150])
def test_a_row_has_the_same_bits_alone_and_beside_longer_ones(
    tmp_path: Path, capacity: int
) -> None:
    """Same request, same bits: attention reads further for the others, and the head more rows."""
    shape = Shape(context=192)
    source = write_tiny_gguf(tmp_path / "tiny.gguf", types="Q4_1", shape=shape)
    bundle = exported(source, tmp_path)
    graphs = Graphs(bundle, level=4)  # at 1, a product of one row is ONNX Runtime's exception
    short, long = (IDS * 2)[:30], (IDS * 8)[:140]
    one, two = empty_kv(bundle, capacity=capacity), empty_kv(bundle, 2, capacity)
    alone = graphs.run(c.PREFILL_RAGGED, one, [short], [0])
    beside = graphs.run(c.PREFILL_RAGGED, two, [short, long], [0, 0])
    np.testing.assert_array_equal(beside[0, :30], alone[0])
    alone = graphs.run(c.DECODE, one, [[7]], [30])
    beside = graphs.run(c.DECODE, two, [[7], [8]], [30, 140])
    np.testing.assert_array_equal(beside[0], alone[0])
    for name, array in one.items():
        np.testing.assert_array_equal(two[name][0, :, :31], array[0, :, :31])


def test_padding_near_the_end_of_the_cache_writes_nothing(tmp_path: Path) -> None:
    """A short row beside a long one ends within its capacity, though its padding would not."""
    bundle = exported(write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path)
    graphs, capacity = Graphs(bundle), 16
    alone, kv = empty_kv(bundle, capacity=capacity), empty_kv(bundle, 2, capacity)
    graphs.run(c.PREFILL, alone, [IDS[:12]], [0])
    for name, array in alone.items():
        kv[name][0] = array[0]
    before = {name: array.copy() for name, array in kv.items()}
    rows = graphs.run(c.PREFILL_RAGGED, kv, [IDS[12:15], IDS[:8]], [12, 0])
    expected = graphs.run(c.PREFILL, alone, [IDS[12:15]], [12])
    assert_close(rows[:1, :3], expected)
    for name, array in kv.items():
        np.testing.assert_array_equal(array[0, :, :12], before[name][0, :, :12])
        np.testing.assert_array_equal(array[0, :, 15:], before[name][0, :, 15:])
        np.testing.assert_array_equal(array[1, :, 8:], before[name][1, :, 8:])


def test_one_buffer_as_past_and_present_is_written_in_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The runtime binds the cache once; ONNX Runtime warns where it copies it every step."""
    bundle = exported(write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path)
    expected_kv, kv = empty_kv(bundle), empty_kv(bundle)
    expected = Graphs(bundle).run(c.PREFILL, expected_kv, [IDS], [0])
    use_threads(None)
    options = session_options({})
    options.log_severity_level = 2  # warnings
    session = ort.InferenceSession(bundle / "prefill.onnx", options)
    binding = session.io_binding()
    binding.bind_output(c.LOGITS)
    for name, array in feeds(c.PREFILL, [IDS], [0]).items():
        binding.bind_cpu_input(name, array)
    for name, array in kv.items():
        value = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
    capfd.readouterr()
    session.run_with_iobinding(binding)
    assert "in-place" not in capfd.readouterr().err
    assert_close(binding.get_outputs()[0].numpy(), expected)
    for name, array in kv.items():
        np.testing.assert_array_equal(array, expected_kv[name])


@pytest.mark.parametrize("head_dim", [24, 18])
def test_any_even_head_size_is_computed(tmp_path: Path, head_dim: int) -> None:
    """The default flavor's operator takes multiples of 16 only, and says what takes more."""
    shape = Shape(head_dim=head_dim)
    source = write_tiny_gguf(tmp_path / "odd.gguf", types="F16", shape=shape)
    with pytest.raises(ConfigError, match=rf"head size {head_dim} .*add --attention onnx"):
        exported(source, tmp_path, "gqa")
    bundle = exported(source, tmp_path)
    found = Graphs(bundle).run(c.PREFILL, empty_kv(bundle), [IDS], [0])
    assert_close(found[0], ReferenceLlama(source).logits(IDS), 1e-4)


def test_a_head_size_that_no_flavor_takes_is_refused(tmp_path: Path) -> None:
    """Rotary embedding turns pairs; nothing is written."""
    source = write_tiny_gguf(tmp_path / "odd.gguf", shape=Shape(head_dim=15))
    with pytest.raises(ConfigError, match="head size 15") as caught:
        exported(source, tmp_path)
    assert "add --attention" not in str(caught.value)
    assert not (tmp_path / "onnx").exists()


FEATURES: Mapping[str, dict[str, Any]] = {
    "partial-rotary-and-window": config(
        "phi3", head_dim=32, partial_rotary_factor=0.5, sliding_window=5
    ),
    "windows-in-some-layers": config(
        "qwen3",
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "no-rope-layers": config("smollm3", no_rope_layers=[0, 1], tie_word_embeddings=True),
    "multipliers": config("granite"),
    "biases": config(attention_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("name", FEATURES)
def test_ragged_rows_of_every_kind_of_layer_equal_rows_alone(tmp_path: Path, name: str) -> None:
    """Windows and positions are each row's own, whatever the padding of others."""
    bundle = exported(write_folder(tmp_path / "model", FEATURES[name]), tmp_path)
    graphs, kv = Graphs(bundle), empty_kv(bundle, batch=2)
    alone = graphs.run(c.PREFILL, empty_kv(bundle), [IDS], [0])[0]
    graphs.run(c.PREFILL_RAGGED, kv, [IDS[:7], IDS[:3]], [0, 0])
    rows = graphs.run(c.PREFILL_RAGGED, kv, [IDS[7:9], IDS[3:12]], [7, 3])
    assert_close(rows[0, :2], alone[7:9])
    assert_close(rows[1], alone[3:12])
    last = graphs.run(c.DECODE, kv, [IDS[9:10], IDS[12:13]], [9, 12])
    assert_close(last[:, 0], alone[[9, 12]])


def test_runtime_runs_it_from_one_packed_file(source: Path, tmp_path: Path) -> None:
    """Both graphs share their packed weights, and greedy tokens are the default flavor's."""
    results = []
    kinds: tuple[AttentionChoice, ...] = ("onnx", "gqa")
    for attention in kinds:
        folder = exported(source, tmp_path, attention)
        cache = str(tmp_path / f"cache-{attention}")
        with ortolan.load(folder, accuracy="exact", cache_dir=cache) as llm:
            params = ortolan.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            results.append((llm.logits(IDS), llm.generate([IDS], params)[0].token_ids))
    assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert len(list((tmp_path / "cache-onnx").rglob("weights.packed"))) == 1
