"""`ortolan inspect`: rows that a reader can take in, and numbers that are right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import Result
from onnx import TensorProto, helper

from ortolan.cli.summary import bytes_by_precision, collapse_layers, count_operators, side_by_side
from ortolan.graphs.manifest import Manifest, TensorEntry, WeightGroup

Run = Callable[..., Result]
RunCli = Callable[..., subprocess.CompletedProcess[str]]


def test_layers_become_one_row() -> None:
    """Sixty lines of KV would push everything else off the screen."""
    kv = [
        TensorEntry(f"past_key_values.{layer}.{part}", "float32", ["batch", 3])
        for layer in range(30)
        for part in ("key", "value")
    ]
    ids = TensorEntry("input_ids", "int64", ["batch", 1])
    row = TensorEntry("past_key_values.0..29.key|value", "float32", ["batch", 3])
    assert collapse_layers([ids, *kv]) == [ids, row]


def test_layers_that_differ_stay_apart() -> None:
    """A row that claims one shape for all layers must be true of all."""
    tensors = [
        TensorEntry("past.0.key", "float32", [3]),
        TensorEntry("past.1.key", "float32", [4]),
        TensorEntry("past.2.key", "float32", [3]),
    ]
    assert [(row.name, row.shape) for row in collapse_layers(tensors)] == [
        ("past.0,2.key", [3]),
        ("past.1.key", [4]),
    ]


def test_bytes_add_up_by_precision() -> None:
    """What fills the memory is the question that inspect answers."""
    groups = [
        WeightGroup("embedding", "int8", 1, 10, 12),
        WeightGroup("norm", "float32", 1, 5, 20),
        WeightGroup("mlp", "int8", 2, 8, 9),
    ]
    assert bytes_by_precision(groups) == {"int8": 21, "float32": 20}


def test_operators_are_counted_inside_branches_too(tmp_path: Path) -> None:
    """An operator that hides in a branch is still one that the provider must run."""
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
    branch = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "branch", [], out)
    nodes = [
        helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch),
        helper.make_node("Abs", ["z"], ["w"]),
        helper.make_node("QuickGelu", ["w"], ["v"], domain="com.microsoft"),
    ]
    path = tmp_path / "graph.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "main", [], [])), path)
    assert count_operators(path) == {"Abs": 3, "If": 1, "com.microsoft.QuickGelu": 1}


def test_operators_stand_side_by_side() -> None:
    """Fusion shows as one name that shrinks and another that appears."""
    rows = side_by_side({"MatMul": 4, "Add": 1}, {"MatMulNBits": 4, "Add": 1})
    assert rows == [("MatMul", 4, 0), ("Add", 1, 1), ("MatMulNBits", 0, 4)]


def test_summary_shows_every_part(run: Run, tiny_bundle: Path) -> None:
    """Model, source, files, weights, graphs: each answers a question of its own."""
    done = run("inspect", tiny_bundle, "--no-operators")
    assert done.exit_code == 0
    for part in (
        "tiny.gguf",
        "3 layers",
        "1.0 KB",
        "9.00",  # bits of each embedding element
        "940 bytes",  # of int8 together
        "past_key_values.0..2.key|value",
        "[batch, 1, capacity, 4]",
    ):
        assert part in done.stdout
    assert "\x1b" not in done.stdout


def test_json_holds_the_manifest(run: Run, tiny_bundle: Path) -> None:
    """One object with the manifest's own names, so that nothing has to be learned twice."""
    found = json.loads(run("inspect", tiny_bundle, "--no-operators", "--json").stdout)
    assert found["bytes_by_precision"] == {"int8 block 32": 940, "float32": 60}
    assert found["model"]["num_layers"] == Manifest.read(tiny_bundle).model.num_layers
    assert found["operators"] is None


def test_sampling_defaults_are_shown(run: Run, tiny_bundle: Path) -> None:
    """They decide what an answer looks like where nobody says anything."""
    assert "none given" in run("inspect", tiny_bundle, "--no-operators").stdout
    stated = {"do_sample": True, "top_k": 20, "top_p": 0.95, "eos_token_id": 2}
    (tiny_bundle / "generation_config.json").write_text(json.dumps(stated))
    done = run("inspect", tiny_bundle, "--no-operators")
    # The vocabulary of this one has 8 tokens.
    assert "temperature 1, top_k 8, top_p 0.95" in done.stdout
    found = json.loads(run("inspect", tiny_bundle, "--no-operators", "--json").stdout)
    assert found["sampling_defaults"] == {"temperature": 1.0, "top_k": 8, "top_p": 0.95}


def test_file_that_is_no_graph_is_named(run: Run, tiny_bundle: Path) -> None:
    """A library's parse error would not say which file."""
    done = run("inspect", tiny_bundle)
    assert done.exit_code == 1
    assert "decode.onnx: is no ONNX graph" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["/etc/passwd", "../decode.onnx", "unlisted.onnx", ".."])
def test_graph_outside_the_bundle_is_not_opened(run: Run, tiny_bundle: Path, name: str) -> None:
    """A manifest from anyone must not choose what is read."""
    file = tiny_bundle / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["graphs"]["decode"]["file"] = name
    file.write_text(json.dumps(manifest))
    done = run("inspect", tiny_bundle)
    assert done.exit_code == 1
    assert "not one of the bundle's files" in done.stderr


def test_graph_that_only_the_runtime_knows_is_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path
) -> None:
    """A manifest without graphs must not end in a KeyError."""
    file = tiny_bundle / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "graphs": {}}))
    graph = tiny_bundle / "graph.onnx"
    onnx.save(helper.make_model(helper.make_graph([], "empty", [], [])), graph)
    monkeypatch.setattr("ortolan.cli.inspect._optimized_graphs", lambda *_: {"decode": graph})
    assert run("inspect", tiny_bundle).exit_code == 0


def test_source_name_cannot_steer_the_terminal(run: Run, tiny_bundle: Path) -> None:
    """The name came with the bundle, and may hold escape codes."""
    file = tiny_bundle / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["source"]["name"] = "\x1b]0;title\x07"
    file.write_text(json.dumps(manifest))
    done = run("inspect", tiny_bundle, "--no-operators")
    assert "\\x1b]0;title\\x07" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("missing", "extra"), [("onnx", "export"), ("onnxruntime", "cpu")])
def test_missing_package_leaves_the_rest(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    smollm2_bundle: Path,
    missing: str,
    extra: str,
) -> None:
    """A serving machine has no onnx; it can still say what it serves."""
    monkeypatch.setitem(sys.modules, missing, None)
    done = run("inspect", smollm2_bundle)
    assert done.exit_code == 0
    assert "past_key_values.0..29.key|value" in done.stdout
    assert f"pip install '.[{extra}]'" in done.stderr


def test_real_bundle_shows_what_fusion_did(run_cli: RunCli, smollm2_bundle: Path) -> None:
    """Products that are not fused make decode several times slower: this is where to look."""
    found = json.loads(run_cli("inspect", smollm2_bundle, "--json").stdout)
    decode = found["operators"]["decode"]
    assert decode["before"]["DequantizeLinear"] == 120
    assert "DequantizeLinear" not in decode["after"]
    assert decode["after"]["com.microsoft.MatMulNBits"] == 121
    assert found["missing"] == []
