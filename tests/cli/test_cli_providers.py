"""`ortolan providers`, and the options that say what to run on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_llama import write_tiny_gguf

from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.runtime.engine import placement
from ortolan.runtime.providers import probe, survey
from ortolan.runtime.providers.placement import place

Run = Any


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("providers")
    source = write_tiny_gguf(folder / "tiny.gguf")
    export_bundle(str(source), folder / "bundle", ExportOptions())
    return folder / "bundle"


def test_table_names_every_provider_and_how_to_add_it(run: Run) -> None:
    done = run("providers")
    assert done.exit_code == 0, done.output
    for name in ("cpu", "cuda", "directml", "openvino", "webgpu"):
        assert re.search(rf"^{name} +(usable|fails|not here)", done.stdout, re.MULTILINE), name
    assert re.search(r"^cpu +usable", done.stdout, re.MULTILINE)
    assert ".[cuda]" in done.stdout


def test_one_provider_alone_as_json(run: Run) -> None:
    """A deployment script asks for what it needs, and reads the answer."""
    done = run("providers", "--provider", "cpu", "--json")
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["providers"]] == ["cpu"]
    assert found["providers"][0]["state"] == "usable"
    assert found["version"]
    assert done.exit_code == 0


def test_provider_that_does_not_work_is_exit_status_1(run: Run) -> None:
    done = run("providers", "--provider", "directml")
    assert done.exit_code == 1
    assert "provider directml does not work here" in done.stderr


def test_problems_are_beside_the_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "runtime_problems", lambda *args: ["two in one folder"])
    monkeypatch.setattr(survey, "probe", lambda *args: probe.Probed(True))
    assert "warning: two in one folder" in run("providers").stderr


def test_options_without_a_provider_are_refused(run: Run) -> None:
    """They would go to the CPU's provider, which takes none."""
    done = run("providers", "--provider-option", "device_id=1")
    assert done.exit_code == 2
    assert "provider cpu has no option 'device_id'; it takes none" in done.stderr


def test_bundles_nodes_are_counted_by_provider(run: Run, bundle: Path) -> None:
    done = run("providers", bundle)
    assert done.exit_code == 0, done.output
    for graph in ("decode", "prefill_ragged", "sample"):
        assert f"{graph} on" in done.stdout
    assert re.search(r"CPUExecutionProvider +compute +\d+ .*MatMul \d+", done.stdout)
    assert re.search(r"CPUExecutionProvider +shapes +\d+ .*Shape \d+", done.stdout)


@pytest.fixture
def fallen(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    """A provider that leaves the sampling graph's first node to the CPU."""
    graph = (bundle / "sample.onnx").read_bytes()
    node = SimpleNamespace(name="GatherElements_node_0", op_type="GatherElements")
    part = SimpleNamespace(ep_name="CPUExecutionProvider", get_nodes=lambda: [node])
    placed = {"decode": place(graph, [], "Wren"), "sample": place(graph, [part], "Wren")}
    monkeypatch.setattr(placement, "graph_placements", lambda *args: ("Wren", placed))


@pytest.mark.usefixtures("fallen")
def test_strict_fails_where_compute_fell_back(run: Run, bundle: Path) -> None:
    """So that a pipeline stops before a slow service is rolled out."""
    done = run("providers", bundle)
    assert done.exit_code == 0
    assert "leaves 1 compute nodes to the CPU" in done.stdout
    strict = run("providers", bundle, "--strict")
    assert strict.exit_code == 1
    assert "leaves 1 compute nodes to the CPU, in sample" in strict.stderr
    found = json.loads(run("providers", bundle, "--json").stdout)
    assert found["left_to_cpu"] == {"decode": {}, "sample": {"GatherElements": 1}}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("device_id", "--provider-option is 'device_id'; it must be KEY=VALUE"),
        ("=1", "--provider-option is '=1'; it must be KEY=VALUE"),
        ("gpu_memlimit=1", "provider cuda has no option 'gpu_memlimit'; did you mean gpu_mem"),
        ("use_tf32=perhaps", "option use_tf32 of provider cuda is 'perhaps'; it must be 0 or 1"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "b", "x"], ["verify", "b"], ["serve", "b"]])
def test_wrong_option_is_refused_before_anything_is_read(
    run: Run, command: list[str], option: str, said: str
) -> None:
    """There is no bundle `b`: a typing error is found first."""
    done = run(*command, "--provider", "cuda", "--provider-option", option)
    assert done.exit_code == 2, done.output
    assert said in done.stderr


def test_options_reach_the_engine(run: Run, fake: Any) -> None:
    run(
        *("generate", "bundle", "x", "--provider", "cuda", "--strict"),
        *("--provider-option", "device_id=1", "--provider-option", "gpu_mem_limit=8GiB"),
    )
    _, settings = fake.loaded
    assert settings["provider_options"] == {"device_id": "1", "gpu_mem_limit": "8GiB"}
    assert settings["strict"] is True
