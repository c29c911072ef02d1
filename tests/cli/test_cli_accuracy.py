"""Accuracy reports: the numbers themselves, where they are kept, and when there are none."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from reference_llama import ReferenceLlama
from tiny_llama import write_tiny_gguf

import ortolan
from ortolan.cli import accuracy
from ortolan.cli.accuracy import Divergences
from ortolan.errors import EngineError
from ortolan.graphs.manifest import MANIFEST_NAME, AccuracyReport, Manifest, TextAccuracy

Run = Callable[..., Result]

TOKENS = 130  # of each text, so that a test takes a second; three windows of a context of 64


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        accuracy, "TEXTS", tuple((name, file, TOKENS) for name, file, _ in accuracy.TEXTS)
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("report") / "tiny.gguf", tied=False)


@pytest.fixture(scope="module")
def rounded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source in int4, exported by the command line with its report. Read it only."""
    from click.testing import CliRunner

    bundle = tmp_path_factory.mktemp("rounded") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "TEXTS", tuple((n, f, TOKENS) for n, f, _ in accuracy.TEXTS))
        done = CliRunner().invoke(
            ortolan.cli.app.main, ["export", str(source), str(bundle), "--weights", "int4"]
        )
    assert done.exit_code == 0, done.stderr
    assert "other scripts" in done.stdout
    assert done.stderr == ""  # float weights were rounded for the first time
    return bundle


def test_numbers_are_those_of_another_implementation(
    source: Path, rounded: Path, root: Path, tmp_path: Path
) -> None:
    """The whole chain, recomputed with float64 numpy weights and formulas written down anew."""
    (report,) = Manifest.read(rounded).accuracy_reports
    reference = ReferenceLlama(source)
    kl, same, losses, reference_losses = [], [], [], []
    with ortolan.load(rounded, max_slots=1, cache_dir=str(tmp_path)) as llm:
        for _, file, _ in accuracy.TEXTS:
            ids = llm.encode((root / "ortolan" / file).read_text(encoding="utf-8"))[:TOKENS]
            for start in range(0, TOKENS, 64):
                window = ids[start : start + 64]
                p = probabilities(reference.logits(window))[:-1]
                q = probabilities(llm.logits(window).astype(np.float64))[:-1]
                kl += list((p * np.log(p / q)).sum(-1))
                same += list(p.argmax(-1) == q.argmax(-1))
                places = np.arange(len(window) - 1), window[1:]
                losses += list(-np.log(q[places]))
                reference_losses += list(-np.log(p[places]))
    assert report.total.tokens == len(kl) == 3 * (TOKENS - 3)
    assert report.total.mean_kl == pytest.approx(np.mean(kl), rel=1e-3)
    assert report.total.p99_kl == pytest.approx(np.percentile(kl, 99), rel=1e-2)
    assert report.total.top1_agreement == pytest.approx(np.mean(same), abs=0.006)
    assert report.total.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)
    expected = np.exp(np.mean(reference_losses))
    assert report.total.reference_perplexity == pytest.approx(expected, rel=1e-3)
    assert [text.text for text in report.texts] == ["English", "code", "other scripts"]
    assert report.accuracy == "default"
    assert report.runtime.startswith("onnxruntime ")


def probabilities(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(-1, keepdims=True))


def test_numbers_worked_by_hand() -> None:
    """Two tokens, two positions: KL, agreement and perplexity on paper."""
    found = Divergences()
    found.add(np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]]), [1, 0])
    summary = found.summary("by hand")
    first = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    assert summary.mean_kl == pytest.approx(first / 2)
    assert summary.p99_kl == pytest.approx(0.99 * first)
    assert summary.tokens == 2
    assert summary.perplexity == pytest.approx((1 / (0.75 * 0.9)) ** 0.5)
    assert summary.reference_perplexity == pytest.approx((1 / (0.5 * 0.9)) ** 0.5)


def test_logits_that_are_not_finite_give_no_report() -> None:
    """NaN in a manifest would be no JSON, and pass for a measurement."""
    found = Divergences()
    with np.errstate(invalid="ignore"):
        found.add(np.zeros((1, 2)), np.array([[np.nan, 0.0]]), [0])
    with pytest.raises(EngineError, match="not finite"):
        found.summary("code")


def test_nothing_is_left_beside_the_bundle(rounded: Path) -> None:
    """The reference and what was packed for it are larger than the bundle."""
    assert [path.name for path in rounded.parent.iterdir()] == ["bundle"]
    listed = {*Manifest.read(rounded).files, MANIFEST_NAME}
    assert {path.name for path in rounded.iterdir()} == listed


def test_inspect_prints_the_report(run: Run, rounded: Path) -> None:
    """Whoever gets the bundle sees what its precision costs."""
    (report,) = Manifest.read(rounded).accuracy_reports
    said = run("inspect", rounded, "--no-operators").stdout
    assert "accuracy default" in said
    assert f"{report.total.mean_kl:.2g}" in said
    shown = json.loads(run("inspect", rounded, "--no-operators", "--json").stdout)
    assert shown["accuracy_reports"] == [dataclasses.asdict(report)]


def test_verify_measures_again(run: Run, source: Path, rounded: Path) -> None:
    """On the same machine the same numbers, to the last digit."""
    done = run("verify", rounded, "--source", source, "--json")
    assert done.exit_code == 0
    (report,) = Manifest.read(rounded).accuracy_reports
    assert json.loads(done.stdout)["accuracy_reports"] == [dataclasses.asdict(report)]
    exact = run("verify", rounded, "--source", source, "--accuracy", "exact")
    assert exact.exit_code == 0
    assert "accuracy exact" in exact.stdout


def test_verify_finds_a_bundle_that_is_worse_than_it_says(
    run: Run, source: Path, rounded: Path, tmp_path: Path
) -> None:
    """A report that was copied from a better bundle must not go unnoticed."""
    shutil.copytree(rounded, tmp_path / "copy")
    manifest = Manifest.read(rounded)
    (report,) = manifest.accuracy_reports
    better = dataclasses.replace(
        report, total=dataclasses.replace(report.total, mean_kl=report.total.mean_kl / 100)
    )
    dataclasses.replace(manifest, accuracy_reports=[better]).write(tmp_path / "copy")
    done = run("verify", tmp_path / "copy", "--source", source)
    assert done.exit_code == 1
    assert "mean KL" in done.stderr


def test_verify_refuses_another_source(run: Run, rounded: Path, tmp_path: Path) -> None:
    """Numbers against another model's weights would look like terrible rounding."""
    other = write_tiny_gguf(tmp_path / "other.gguf", tied=False, seed=1)
    done = run("verify", rounded, "--source", other)
    assert done.exit_code == 2
    assert "is not the checkpoint" in done.stderr


def test_source_weights_are_compared_with_themselves(
    run: Run, tiny_q4_1: Path, tmp_path: Path
) -> None:
    """An exact import has a report too: products with int8 activations have their price."""
    done = run("export", tiny_q4_1, tmp_path / "bundle")
    assert done.exit_code == 0, done.stderr
    (report,) = Manifest.read(tmp_path / "bundle").accuracy_reports
    assert 0 < report.total.mean_kl < 0.05
    assert "warning" not in done.stderr


@pytest.fixture
def tiny_q4_1(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "q4_1.gguf", types="Q4_1")


def test_rounding_a_second_time_is_warned_of_with_its_cost(
    run: Run, tiny_q4_1: Path, tmp_path: Path
) -> None:
    """Whoever asks for it must learn what it did, in the same breath."""
    done = run("export", tiny_q4_1, tmp_path / "bundle", "--weights", "int4")
    assert done.exit_code == 0, done.stderr
    manifest = Manifest.read(tmp_path / "bundle")
    assert manifest.rounded_from == ["int4 block 32 + offsets"]
    assert "warning" in done.stderr
    assert f"mean KL is {manifest.accuracy_reports[0].total.mean_kl:.2g}" in done.stderr
    without = run("export", tiny_q4_1, tmp_path / "b", "--weights", "int4", "--no-report")
    assert "was not measured" in without.stderr


def test_no_report_is_written_down(run: Run, source: Path, tmp_path: Path) -> None:
    """A bundle without numbers says that nobody measured it."""
    done = run("export", source, tmp_path / "bundle", "--weights", "int8", "--no-report", "--json")
    found = json.loads(done.stdout)
    assert (found["accuracy_reports"], found["no_report"]) == ([], "--no-report")
    assert Manifest.read(tmp_path / "bundle").no_report == "--no-report"
    assert "--no-report" in run("inspect", tmp_path / "bundle", "--no-operators").stderr


def test_without_onnxruntime_the_bundle_is_there_all_the_same(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporting machine need not be able to run anything."""
    monkeypatch.setattr(
        "ortolan.optional.import_module", lambda name: (_ for _ in ()).throw(absent(name))
    )
    done = run("export", source, tmp_path / "bundle", "--weights", "int8")
    assert done.exit_code == 0
    assert "pip install '.[cpu]'" in done.stderr
    assert "onnxruntime" in str(Manifest.read(tmp_path / "bundle").no_report)


def absent(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_bundle_without_a_tokenizer_says_so(rounded: Path) -> None:
    """Token ids alone are no text."""
    manifest = Manifest.read(rounded)
    assert accuracy.why_no_report(manifest) is None
    files = {name: entry for name, entry in manifest.files.items() if name != "tokenizer.json"}
    reason = accuracy.why_no_report(dataclasses.replace(manifest, files=files))
    assert "no tokenizer" in str(reason)


@pytest.mark.parametrize(
    "options",
    [
        ["--weights", "int3"],
        ["--weights", "int4", "--block-size", "24"],
        ["--block-size", "64"],
        ["--asymmetric"],
        ["--lm-head", "int2"],
        ["--embedding", "q8"],
    ],
)
def test_options_that_cannot_be_end_with_2(
    run: Run, source: Path, tmp_path: Path, options: list[str]
) -> None:
    """The status of a wrong command line, and nothing is written."""
    done = run("export", source, tmp_path / "bundle", *options)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "bundle").exists()


def test_manifest_is_replaced_whole_or_not_at_all(
    rounded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while a report is added must leave the finished bundle readable."""
    shutil.copytree(rounded, tmp_path / "copy")
    manifest = Manifest.read(rounded)

    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            dataclasses.replace(manifest, no_report="changed").write(tmp_path / "copy")
    assert Manifest.read(tmp_path / "copy") == manifest
    assert not list((tmp_path / "copy").glob(".manifest*"))


def test_reports_survive_json(rounded: Path, tmp_path: Path) -> None:
    """Written by export, read by inspect and verify."""
    text = TextAccuracy("all", 3, 0.1, 0.2, 0.9, 12.0, 11.0)
    report = AccuracyReport("exact", "r", "onnxruntime 0", text, [text])
    manifest = dataclasses.replace(Manifest.read(rounded), accuracy_reports=[report])
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_shipped_texts_are_of_three_kinds(root: Path) -> None:
    """Accuracy on English alone says little about code or other scripts."""
    texts: dict[str, Any] = {
        name: (root / "ortolan" / file).read_text(encoding="utf-8")
        for name, file, _ in accuracy.TEXTS
    }
    assert texts["English"].isascii() or len(texts["English"]) > 3000
    assert "def " in texts["code"]
    assert sum(ord(letter) > 0x3FF for letter in texts["other scripts"]) > 200
