"""The decoder graphs as files: contract, manifest, versions, and weights stored once."""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny_llama import write_tiny_gguf

from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.graphs import contract as c
from ortolan.graphs.build import build_decoder_graph, decoder_contract
from ortolan.graphs.formats import EMBEDDING, FLOAT32, LM_HEAD, W8A8, plan_layer
from ortolan.graphs.manifest import WEIGHTS_NAME, Manifest, ModelConfig

DECODERS = (c.DECODE, c.PREFILL, c.PREFILL_RAGGED)
CASES: dict[str, tuple[Any, bool, ExportOptions]] = {
    "tied-as-demo": ({"*": "Q4_1", "token_embd*": "Q8_0"}, True, ExportOptions()),
    "tied-float": ("F16", True, ExportOptions()),
    "untied-mixed": ({"*": "Q4_0", "*attn_v*": "Q8_0"}, False, ExportOptions()),
    "expanded": ("Q4_1", False, ExportOptions("float32")),
    "float16": ({"*": "Q4_1", "token_embd*": "Q8_0"}, True, ExportOptions(dtype="float16")),
    "bfloat16": ("F16", False, ExportOptions(dtype="bfloat16")),
    "int8-kv-of-floats": ("F16", True, ExportOptions(kv="int8")),
    "int8-kv": ({"*": "Q4_1", "token_embd*": "Q8_0"}, True, ExportOptions(kv="int8")),
}


@pytest.fixture(scope="module", params=CASES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read it, never write into it."""
    types, tied, options = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    source = write_tiny_gguf(folder / "tiny.gguf", types=types, tied=tied)
    export_bundle(str(source), folder / "bundle", options)
    return folder / "bundle"


def load(bundle: Path, graph: str) -> onnx.ModelProto:
    return onnx.load(bundle / f"{graph}.onnx", load_external_data=False)


def entries(values: Any) -> list[tuple[str, str, list[int | str]]]:
    dtypes = {
        onnx.TensorProto.INT32: "int32",
        onnx.TensorProto.INT64: "int64",
        onnx.TensorProto.FLOAT: "float32",
        onnx.TensorProto.INT8: "int8",
        onnx.TensorProto.FLOAT16: "float16",
        onnx.TensorProto.BFLOAT16: "bfloat16",
    }
    return [
        (
            value.name,
            dtypes[value.type.tensor_type.elem_type],
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    ]


def references(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """Initializer name -> offset and length in the weights file, in the graph's order."""
    found = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            assert entry["location"] == WEIGHTS_NAME
            found[tensor.name] = (int(entry["offset"]), int(entry["length"]))
    return found


@pytest.mark.parametrize("graph", DECODERS)
def test_inputs_and_outputs_are_the_contract_and_the_manifest(bundle: Path, graph: str) -> None:
    """The runtime binds by these names and shapes without looking at the graph."""
    manifest = Manifest.read(bundle)
    model = load(bundle, graph).graph
    contract = decoder_contract(graph, manifest.model, manifest.dtypes)
    for values, specs, listed in (
        (model.input, contract.inputs, manifest.graphs[graph].inputs),
        (model.output, contract.outputs, manifest.graphs[graph].outputs),
    ):
        found = entries(values)
        assert found == [(spec.name, spec.dtype, list(spec.shape)) for spec in specs]
        assert found == [(item.name, item.dtype, item.shape) for item in listed]


@pytest.mark.parametrize("graph", c.GRAPH_NAMES)
def test_graphs_load_on_older_providers_and_pass_the_checker(
    bundle: Path, graph: str, tmp_path: Path
) -> None:
    """Other providers' wheels lag behind onnx by several versions."""
    model = load(bundle, graph)
    versions = {item.domain: item.version for item in model.opset_import}
    assert model.ir_version == 10
    assert versions[""] <= 24
    assert set(versions) <= {"", "com.microsoft"}
    # ONNX Runtime keeps this one in the standard domain, where the checker does not find it.
    for node in model.graph.node:
        if node.op_type == "SimplifiedLayerNormalization":
            node.domain = "com.microsoft"
    onnx.save(model, tmp_path / "graph.onnx")
    shutil.copy(bundle / WEIGHTS_NAME, tmp_path)
    onnx.checker.check_model(tmp_path / "graph.onnx")


@pytest.mark.parametrize("graph", c.GRAPH_NAMES)
def test_graph_files_hold_no_weights(bundle: Path, graph: str) -> None:
    """What is copied into a graph is stored four times, and read again at every load."""
    model = load(bundle, graph)
    inside = [t for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    assert sum(int(np.prod(tensor.dims)) for tensor in inside) < 100
    constants = [node for node in model.graph.node if node.op_type == "Constant"]
    assert sum(node.ByteSize() for node in constants) < 10_000
    assert (bundle / f"{graph}.onnx").stat().st_size < 40_000 * 2


def test_decoder_graphs_declare_the_same_initializers_in_order(bundle: Path) -> None:
    """ONNX Runtime's packed files are equal only then, and one serves both sessions."""
    first, *others = (
        [
            tensor.SerializeToString()
            for tensor in load(bundle, graph).graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL
        ]
        for graph in DECODERS
    )
    assert len(first) > 10
    assert all(other == first for other in others)


def test_every_tensor_is_stored_once(bundle: Path) -> None:
    """Ranges do not overlap, apart from the tied head's view of the embedding, and none is idle."""
    found = references(load(bundle, c.DECODE))
    ranges = sorted(set(found.values()))
    for (offset, length), (following, _) in itertools.pairwise(ranges):
        assert offset + length <= following
    size = (bundle / WEIGHTS_NAME).stat().st_size
    assert ranges[-1][0] + ranges[-1][1] == size
    # All that lies between them is alignment.
    assert sum(length for _, length in ranges) <= size < sum(length + 4096 for _, length in ranges)
    assert all(offset % (4096 if length >= 65536 else 64) == 0 for offset, length in ranges)
    twice = {name for name, place in found.items() if list(found.values()).count(place) > 1}
    assert twice in (set(), {f"{EMBEDDING}.weight", f"{LM_HEAD}.weight"})


def test_tied_quantized_head_is_a_view_of_the_embedding(tiny_bundle: Path) -> None:
    """The vocabulary's table is the largest tensor of a small model."""
    found = references(load(tiny_bundle, c.DECODE))
    assert found[f"{EMBEDDING}.weight"] == found[f"{LM_HEAD}.weight"]
    assert found[f"{EMBEDDING}.weight"][1] == 300 * 64


def test_manifest_accounts_for_every_stored_byte(bundle: Path) -> None:
    """`inspect` shows these groups as the bundle's size by precision."""
    manifest = Manifest.read(bundle)
    stored = sum(length for _, length in set(references(load(bundle, c.DECODE)).values()))
    assert sum(group.bytes for group in manifest.weights) == stored
    assert sum(group.tensors for group in manifest.weights) >= 2 * 6 + 3


def test_manifest_lists_every_file_with_size_and_hash(bundle: Path) -> None:
    """Opening a bundle trusts nothing that is not listed here."""
    manifest = Manifest.read(bundle)
    present = {path.name for path in bundle.iterdir()}
    assert present == {*manifest.files, "manifest.json"}
    for name, entry in manifest.files.items():
        data = (bundle / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.size, entry.sha256)


def test_source_precision_is_kept_per_group(tiny_bundle: Path) -> None:
    """Precision is stated, never implied."""
    groups = {group.role: group for group in Manifest.read(tiny_bundle).weights}
    assert groups["embedding"].precision == "int8 block 32"
    assert groups["attention"].precision == "int4 block 32 + offsets"
    assert groups["norm"].precision == "float32"
    # 4 bits, and a scale and an offset in float32, for each block of 32.
    assert groups["mlp"].bytes == groups["mlp"].elements // 2 + groups["mlp"].elements // 32 * 8


def test_export_gives_the_same_bytes_every_time(tiny_gguf: Path, tmp_path: Path) -> None:
    """A bundle's hashes mean something only if the same export gives the same files."""
    for name in ("one", "two"):
        export_bundle(str(tiny_gguf), tmp_path / name, ExportOptions())
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_max_context_bounds_the_rotary_tables(tiny_gguf: Path, tmp_path: Path) -> None:
    """The tables of a long context are most of a small model's float weights."""
    export_bundle(str(tiny_gguf), tmp_path / "bundle", ExportOptions(max_context=17))
    assert Manifest.read(tmp_path / "bundle").model.max_context == 17
    (cos,) = (
        tensor
        for tensor in load(tmp_path / "bundle", c.DECODE).graph.initializer
        if tensor.name == "model.cos_table"
    )
    assert list(cos.dims) == [17, 8]


def tiny_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_context": 8,
        "tie_embeddings": False,
    }
    return ModelConfig(**values | changes)


def test_projections_join_only_where_formats_agree() -> None:
    """A joined projection has one format; joining others would change weights."""
    from ortolan.graphs.formats import WeightFormat

    names = [f"self_attn.{part}_proj" for part in "qkvo"]
    names += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    formats = {f"model.layers.0.{name}": WeightFormat("int4", 32) for name in names}
    plan = plan_layer(tiny_config(), formats, 0)
    assert [p.widths for p in plan.qkv] == [(64, 32, 32)]
    assert [p.widths for p in plan.gate_up] == [(96, 96)]

    formats["model.layers.0.self_attn.v_proj"] = WeightFormat("int4", 32, affine=True)
    plan = plan_layer(tiny_config(), formats, 0)
    assert [p.outputs for p in plan.qkv] == [64, 32, 32]
    assert [len(p.parts) for p in plan.gate_up] == [2]

    # Products of integers share their input's codes, and a joined output would have to be split.
    plan = plan_layer(tiny_config(), dict.fromkeys(formats, W8A8), 0)
    assert [p.widths for p in plan.qkv] == [(64, 32, 32)]
    assert [p.name for p in plan.gate_up] == [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    ]


def test_builder_refuses_a_tensor_of_another_shape_and_a_missing_one() -> None:
    """A wrong reference would be found by ONNX Runtime only on someone else's machine."""
    import onnx_ir as ir

    names = [EMBEDDING, LM_HEAD]
    names += [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    names += [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]
    formats = dict.fromkeys(names, FLOAT32)
    with pytest.raises(KeyError, match=re.escape("model.")):
        build_decoder_graph(c.DECODE, tiny_config(), formats, {})

    class Everything(dict[str, ir.TensorProtocol]):
        def __missing__(self, name: str) -> ir.TensorProtocol:
            return ir.tensor(np.zeros((3, 3), np.float32), name=name)

    with pytest.raises(ValueError, match="the graph wants"):
        build_decoder_graph(c.DECODE, tiny_config(), formats, Everything())
    with pytest.raises(ValueError, match="not a decoder graph"):
        build_decoder_graph(c.SAMPLE, tiny_config(), formats, {})
