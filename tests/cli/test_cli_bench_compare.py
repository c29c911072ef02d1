"""`ortolan bench --provider a,b`: one table, one figure, whatever could not run in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]

QUICK = ("--batch", "1,2", "--prompt", "8", "--context", "4", "--steps", "2", "--repeat", "2")


@pytest.fixture(scope="module")
def bundle(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real bundle of a tiny model."""
    pytest.importorskip("onnxruntime")
    from ortolan.export.exporter import ExportOptions, export_bundle

    folder = tmp_path_factory.mktemp("compared") / "tiny"
    export_bundle(str(tiny_gguf), folder, ExportOptions())
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packed form of the bundle goes."""
    return tmp_path_factory.mktemp("cache")


def test_provider_that_cannot_run_is_a_row_with_its_reason(
    bundle: Path, cache: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever compares five providers owns hardware for two of them."""
    monkeypatch.chdir(tmp_path)  # where no environment has been built
    pytest.importorskip("matplotlib")
    done = run(
        *("bench", bundle, *QUICK, "--provider", "openvino,cpu", "--threads", "1"),
        *("--cache-dir", cache, "--plot", tmp_path / "figure.png"),
    )
    assert done.exit_code == 0, done.output
    words = [line.split() for line in done.stdout.splitlines()]
    assert ["openvino", "cannot", "run"] in words
    assert "openvino cannot run: provider openvino cannot run here" in done.stdout
    assert "of cpu" in done.stdout  # the first that ran
    assert sum(line[:1] in (["prefill"], ["decode"]) for line in words) == 3
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_misspelt_provider_is_refused_before_anything_runs(bundle: Path, run: Run) -> None:
    """After minutes of measuring, its row would say that it cannot run."""
    done = run("bench", bundle, *QUICK, "--provider", "cpu,cdua")
    assert done.exit_code == 1
    assert "provider 'cdua' is unknown; did you mean cuda?" in done.stderr
    assert not done.stdout


def test_comparison_as_json_and_csv(
    bundle: Path, cache: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that reads it finds the environments and every case."""
    monkeypatch.chdir(tmp_path)
    arguments = (
        *("bench", bundle, *QUICK, "--provider", "cpu", "--threads", "1"),
        *("--env", f"cpu={sys.executable}", "--cache-dir", cache),
    )
    done = run(*arguments, "--output", "json")
    found = json.loads(done.stdout)
    assert found["systems"]["cpu"]["python"] == sys.executable
    assert "onnxruntime" in found["systems"]["cpu"]["onnxruntime"]
    cases = [(row["phase"], row["batch"], row["tokens"]) for row in found["results"]]
    assert cases == [("prefill", 1, 8), ("decode", 1, 2), ("decode", 2, 2)]
    lines = run(*arguments, "--output", "csv").stdout.splitlines()
    assert len(lines) == 1 + len(cases)


def test_comparison_of_nothing_fails(
    bundle: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script must not take an empty table for a success."""
    monkeypatch.chdir(tmp_path)
    done = run(
        *("bench", bundle, *QUICK, "--provider", "webgpu,cpu"),
        *("--env", f"cpu={tmp_path}/nowhere"),
    )
    assert done.exit_code != 0
    assert "none of the providers could run" in done.stderr
    assert "cpu cannot run: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--provider", "cpu,cpu"), "different names"),
        (("--provider", "cpu,"), "different names"),
        (("--provider", "cpu,cuda", "--profile"), "--profile looks into one provider"),
        (("--provider", "cpu,cuda", "--env", "webgpu=x"), "--provider names cpu, cuda"),
    ],
)
def test_wrong_options_are_one_sentence(
    bundle: Path, run: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    """Before anything is loaded."""
    done = run("bench", bundle, *arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
