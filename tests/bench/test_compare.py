"""Providers side by side: whose Python, what a ratio means, who is left behind."""

from __future__ import annotations

import csv
import importlib
import io
import sys
import venv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortolan.bench.cases import Case, Plan, Sample
from ortolan.bench.compare import run as compare_run
from ortolan.bench.compare.environments import named_pythons, probe, python_of
from ortolan.bench.compare.report import as_csv, document
from ortolan.bench.compare.run import Comparison, Side
from ortolan.bench.worker import Worker
from ortolan.errors import BenchError, UsageError

CASE = Case("decode", 1, 2, 8, 4)


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own that finds what this one has installed."""
    folder = tmp_path_factory.mktemp("env") / "other"
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in here]
    (packages / "here.pth").write_text("".join(lines))
    return folder / "bin" / "python"


def test_worker_runs_in_the_python_that_it_is_given(other_python: Path) -> None:
    """The distributions of ONNX Runtime replace each other: a wrong one measures something else."""
    worker = Worker(importlib.import_module, "site", python=other_python)
    (packages, *_) = worker.call("getsitepackages")
    worker.close()
    assert Path(packages).is_relative_to(other_python.parent.parent)


def test_environment_is_asked_before_anything_is_loaded(other_python: Path, tmp_path: Path) -> None:
    """A missing Python, or one without Ortolan, is said so, and not as a child's traceback."""
    found = probe(other_python)
    assert found.version.startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    with pytest.raises(BenchError, match="no Python that answers"):
        probe(tmp_path / "nowhere")
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    with pytest.raises(BenchError, match="has no Ortolan like this one; install it there"):
        probe(tmp_path / "bare" / "bin" / "python")


def test_built_environment_is_found_and_a_named_one_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `make test-providers` a comparison needs no options."""
    monkeypatch.chdir(tmp_path)
    assert python_of("openvino", {}) == Path(sys.executable)
    built = Path("build/providers/openvino/bin/python")
    built.parent.mkdir(parents=True)
    built.touch()
    assert python_of("openvino", {}) == built
    assert python_of("openvino", {"openvino": Path("mine/python")}) == Path("mine/python")
    # The environment's folder is as good as its Python.
    assert python_of("openvino", {"openvino": built.parent.parent}) == built


@pytest.mark.parametrize("option", ["openvino", "openvino=", "webgpu=python"])
def test_option_that_names_no_provider_of_the_comparison_is_refused(option: str) -> None:
    """A misspelt name would have the provider run in another environment than was meant."""
    with pytest.raises(UsageError, match="--env"):
        named_pythons([option], ["cpu", "openvino"])


@pytest.fixture
def manifest() -> Any:
    """As much of one as a report asks for."""
    model = SimpleNamespace(architecture="llama", max_context=64)
    return SimpleNamespace(
        model=model,
        source=SimpleNamespace(name="tiny.gguf"),
        files={"weights.bin": SimpleNamespace(sha256="0" * 64)},
        attention="gqa",
        weights=(),
    )


def compared(manifest: Any, *sides: Side) -> Comparison:
    return Comparison(manifest, Plan(threads=(1,)), [CASE], list(sides), [], None)


def test_ratio_is_speed_over_the_first_that_ran(manifest: Any) -> None:
    """Above one is faster than the first; a provider that failed is nobody's measure."""
    broken = Side("cuda", reason="no driver")
    first = Side("cpu", samples={CASE: [Sample(1.0), Sample(2.0), Sample(4.0)]})
    fast = Side("openvino", samples={CASE: [Sample(0.5), Sample(1.0), Sample(1.0)]})
    found = document(compared(manifest, broken, first, fast), "tiny", "2026-11-30")
    assert found["first"] == "cpu"
    rows = {row["system"]: row for row in found["results"]}
    assert rows["cpu"]["ratio"]["median"] == 1.0
    assert rows["openvino"]["ratio"] == {"median": 2.0, "low": 2.0, "high": 4.0}
    assert rows["openvino"]["tokens_per_s"] == 2 * 4 / 1.0
    assert found["systems"]["cuda"]["reason"] == "no driver"


def test_table_for_programs_has_who_could_not_run(manifest: Any) -> None:
    """A provider that is not in the file looks as if nobody had asked for it."""
    sides = (Side("cpu", samples={CASE: [Sample(1.0)]}), Side("cuda", reason="no driver"))
    found = document(compared(manifest, *sides), "tiny", "2026-11-30")
    ran, lost = csv.DictReader(io.StringIO(as_csv(found)))
    assert (ran["system"], ran["tokens_per_s"], ran["reason"]) == ("cpu", "8.0", "")
    assert (lost["system"], lost["phase"], lost["reason"]) == ("cuda", "", "no driver")


class _Peer:
    """Answers for a side without a process; fails from the run of that number on."""

    version, note = "1", ""

    def __init__(self, name: str, order: list[str], fails_at: int | None = None) -> None:
        self.name = name
        self._order = order
        self._fails_at = fails_at
        self._runs = 0
        self.closed = False

    def supports(self, case: Case) -> bool:
        return True

    def run(self, case: Case) -> Sample:
        if self._runs == self._fails_at:
            raise BenchError("the device is gone")
        self._runs += 1
        self._order.append(self.name)
        return Sample(1.0)

    def close(self) -> None:
        self.closed = True


def test_side_that_fails_on_the_way_leaves_and_the_others_go_on() -> None:
    """Half an hour of measuring must not be lost to one driver; nor half a result be shown."""
    order: list[str] = []
    peers = [_Peer("a", order), _Peer("b", order, fails_at=1), _Peer("c", order)]
    sides = [Side(peer.name, peer=peer) for peer in peers]
    compare_run._rounds(sides, [CASE], 3, lambda text: None)
    # Another one first each round, so that none always follows the same one.
    assert order == ["a", "b", "c", "c", "a", "a", "c"]
    assert [side.reason for side in sides] == ["", "the device is gone", ""]
    assert [len(side.samples.get(CASE, ())) for side in sides] == [3, 0, 3]
    assert peers[1].closed


def test_comparison_runs_each_provider_in_its_environment(
    other_python: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent loads no ONNX Runtime for it: what is there may be another one's."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)  # where nobody has made environments of providers
    plan = Plan(threads=(1,), batches=(1, 2), prompts=(8,), contexts=(4,), steps=2, repeat=2)
    plan = replace(plan, engine={"cache_dir": str(tmp_path / "cache")})
    found = compare_run.run_comparison(
        tiny_bundle, plan, ["cpu", "openvino"], {"cpu": other_python}
    )
    cpu, openvino = found.sides
    assert cpu.environment is not None
    assert cpu.environment.python == other_python
    assert {case.phase for case in cpu.samples} == {"prefill", "decode"}
    assert [len(samples) for samples in cpu.samples.values()] == [2, 2, 2]
    assert "OpenVINOExecutionProvider" in openvino.reason
    assert found.first is cpu
