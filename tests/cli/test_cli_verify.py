"""`ortolan verify`: damage is found and named, and the comparison's arithmetic is right."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from ortolan.runtime.reference import LIMITS, equal_from_start, kl_divergence, owed_tokens

Run = Callable[..., Result]
RunCli = Callable[..., subprocess.CompletedProcess[str]]

ROW = np.array([0.5, 3.0, 1.0, -2.0, 0.0, 0.25, -1.0, 2.0], np.float32)


def case(name: str = "one", **changes: Any) -> dict[str, Any]:
    """A case that the fake model passes: it encodes a text as its length and counts from 0."""
    order = [int(index) for index in np.argsort(-ROW)[:4]]
    return {
        "name": name,
        "prompt_ids": [3],
        "text": "abc",
        "last_logits_top20": {"ids": order, "values": [float(ROW[index]) for index in order]},
        "greedy_ids": [0, 1, 2],
        "greedy_top2_gap": [1.0, 1.0, 1.0],
        **changes,
    }


@pytest.fixture
def golden(tmp_path: Path) -> Callable[..., Path]:
    """Writes a golden file of the given cases, with whole last rows if asked for."""

    def write(*cases: dict[str, Any], rows: dict[str, Any] | None = None) -> Path:
        path = tmp_path / "golden.json"
        path.write_text(json.dumps({"reference": "by hand", "cases": list(cases)}))
        if rows is not None:
            np.savez(tmp_path / "golden_last_logits.npz", **rows)
        return path

    return write


def results(done: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)["golden"]["cases"]
    return found


# ── Files ──────────────────────────────────────────────────────────────────────────────────────


def test_whole_bundle_passes(run: Run, tiny_bundle: Path) -> None:
    """The plain check needs no golden file and no ONNX Runtime."""
    done = run("verify", tiny_bundle)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "2 files" in done.stdout


def test_flipped_byte_is_found_and_named(run: Run, tiny_bundle: Path) -> None:
    """A bit that a disk lost in the weights would otherwise show as slightly odd answers."""
    weights = bytearray((tiny_bundle / "weights.bin").read_bytes())
    weights[500] ^= 1
    (tiny_bundle / "weights.bin").write_bytes(weights)
    done = run("verify", tiny_bundle)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 1
    assert "weights.bin: SHA-256 is " in done.stderr
    assert "manifest.json says 541b3e9d" in done.stderr  # of 1,000 zero bytes


def test_every_damaged_file_is_listed(run: Run, tiny_bundle: Path) -> None:
    """Repairing one file only to hear of the next is tiresome."""
    (tiny_bundle / "weights.bin").unlink()
    (tiny_bundle / "decode.onnx").write_bytes(b"short")
    done = run("verify", tiny_bundle)
    assert done.exit_code == 1
    assert "weights.bin: missing" in done.stdout
    assert "decode.onnx: has 5 bytes, manifest.json says 11" in done.stdout
    assert "(and 1 more)" in done.stderr
    report = run("verify", tiny_bundle, "--json")
    assert report.exit_code == 1
    found = json.loads(report.stdout)
    assert (found["ok"], len(found["damage"])) == (False, 2)


@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "a/b", "a\0b", "..", "", "c:\\d"])
def test_name_that_leaves_the_bundle_is_damage(run: Run, tiny_bundle: Path, name: str) -> None:
    """A manifest from anyone must not choose what is read: /dev/zero never ends."""
    file = tiny_bundle / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"][name] = manifest["files"]["weights.bin"]
    file.write_text(json.dumps(manifest))
    done = run("verify", tiny_bundle)
    assert done.exit_code == 1
    assert "no plain file name" in done.stderr
    assert "\0" not in done.output


def test_damaged_bundle_is_not_run(
    run: Run, fake: Any, tiny_bundle: Path, golden: Callable[..., Path]
) -> None:
    """Its results would bury the one thing to know."""
    (tiny_bundle / "weights.bin").unlink()
    assert run("verify", tiny_bundle, "--golden", golden(case())).exit_code == 1
    assert fake.loaded is None


# ── Arithmetic ─────────────────────────────────────────────────────────────────────────────────


def test_kl_against_a_sum_worked_by_hand() -> None:
    """Two tokens with odds 1:1 and 3:1: 0.5 ln(0.5 / 0.75) + 0.5 ln(0.5 / 0.25)."""
    reference, ours = np.array([7.0, 7.0]), np.array([math.log(3), 0.0])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl_divergence(reference, ours) == pytest.approx(expected, rel=1e-12)
    # The direction matters: the other way round gives another number.
    other = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert kl_divergence(ours, reference) == pytest.approx(other, rel=1e-12)


def test_kl_ignores_a_shift_and_survives_large_logits() -> None:
    """Logits mean nothing in absolute terms, and exp(1000) is infinite."""
    row = np.array([1000.0, 999.0, -1000.0], np.float32)
    assert kl_divergence(row, row + 50) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("gaps", "error", "owed"),
    [
        ([1.0, 1.0, 1.0], 0.4, 3),
        ([1.0, 0.7, 1.0], 0.4, 1),
        ([1.0], 0.5, 0),
        ([], 0.0, 0),
        ([1.0], math.nan, 0),
    ],
)
def test_tokens_are_owed_until_the_lead_is_within_twice_the_error(
    gaps: list[float], error: float, owed: int
) -> None:
    """After a step that may rightly differ, the texts differ, and nothing can be compared."""
    assert owed_tokens(gaps, error) == owed


def test_common_beginning() -> None:
    """Equal tokens after a different one are chance."""
    assert equal_from_start([1, 2, 3], [1, 9, 3]) == 1
    assert equal_from_start([1, 2, 3], [1, 2]) == 2


# ── Cases ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("accuracy", ["default", "exact"])
def test_equal_results_pass(
    run: Run, fake: Any, tiny_bundle: Path, golden: Callable[..., Path], accuracy: str
) -> None:
    """Text and chat cases, with and without the whole rows."""
    fake.logits_row = ROW
    chat = case("two", prompt_ids=[1], text=None, messages=[{"role": "user", "content": "x"}])
    path = golden(case(), chat, rows={"one": ROW})
    done = run("verify", tiny_bundle, "--golden", path, "--accuracy", accuracy, "--json")
    assert done.exit_code == 0, done.output
    first, second = results(done)
    assert (first["kl"], second["kl"]) == (0.0, None)
    for result in (first, second):
        assert result["prompt_equal"]
        assert result["top1_equal"]
        assert (result["greedy_equal"], result["greedy_owed"]) == (3, 3)
        assert result["max_abs_error"] == 0.0
    assert fake.loaded[1]["accuracy"] == accuracy
    table = run("verify", tiny_bundle, "--golden", path, "--accuracy", accuracy)
    assert "by hand" in table.stdout
    assert "3/3 owed of 3" in table.stdout


FAILING = [
    ("default", {"prompt_ids": [4]}, 0.0, "prompt ids"),
    ("exact", {"prompt_ids": [4]}, 0.0, "prompt ids"),
    ("default", {"greedy_ids": [0, 5, 2]}, 0.0, "greedy token 1 is 1, expected 5"),
    ("exact", {"greedy_ids": [0, 1, 5]}, 0.0, "greedy token 2 is 2, expected 5"),
    ("exact", {}, 3e-3, "off by 0.003, allowed 0.002"),
    ("default", {}, 1.5, "allowed 0.05"),
    ("exact", {}, math.nan, "off by nan"),
    ("default", {}, math.nan, "KL is nan"),
]


@pytest.mark.parametrize(("accuracy", "changes", "error", "told"), FAILING)
def test_difference_fails_and_is_told(
    run: Run,
    fake: Any,
    tiny_bundle: Path,
    golden: Callable[..., Path],
    accuracy: str,
    changes: dict[str, Any],
    error: float,
    told: str,
) -> None:
    """A check that passes what it should refuse is worse than none."""
    fake.logits_row = ROW.copy()
    fake.logits_row[1] += error
    path = golden(case(**changes), rows={"one": ROW})
    done = run("verify", tiny_bundle, "--golden", path, "--accuracy", accuracy)
    assert done.exit_code == 1
    assert told in done.stdout
    assert done.stderr == (f"error: {tiny_bundle}: 1 of 1 cases differ from the reference: one\n")


def test_token_that_is_not_owed_may_differ(
    run: Run, fake: Any, tiny_bundle: Path, golden: Callable[..., Path]
) -> None:
    """Where the reference itself hardly prefers one token, an error of rounding decides."""
    fake.logits_row = ROW + np.float32(1e-3)
    path = golden(case(greedy_ids=[0, 5, 2], greedy_top2_gap=[1.0, 1e-3, 1.0]))
    done = run("verify", tiny_bundle, "--golden", path, "--accuracy", "exact", "--json")
    assert done.exit_code == 0
    (result,) = results(done)
    assert (result["greedy_equal"], result["greedy_owed"], result["greedy_stated"]) == (1, 1, 3)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        ("{", "is damaged"),
        ("[]", "is not a golden file"),
        ('{"reference": "x"}', "'cases'"),
        (json.dumps({"reference": "x", "cases": [case(greedy_ids=[])]}), "unequal length"),
        (json.dumps({"reference": "x", "cases": [case(prompt_ids=[800])]}), "vocabulary"),
    ],
)
def test_golden_file_that_is_none(
    run: Run, fake: Any, tiny_bundle: Path, tmp_path: Path, content: str | None, told: str
) -> None:
    """Nothing compared must never look like nothing found."""
    path = tmp_path / "golden.json"
    if content is not None:
        path.write_text(content)
    done = run("verify", tiny_bundle, "--golden", path)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: --golden {path}: ")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ── The real model ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("accuracy", ["default", "exact"])
def test_real_bundle_passes_the_reference(
    run_cli: RunCli, smollm2_bundle: Path, shared: Path, accuracy: str
) -> None:
    """The product in one line: our numbers are those of an implementation that is not ours."""
    golden = shared / "golden" / "smollm2.json"
    done = run_cli(
        *("verify", smollm2_bundle, "--golden", golden, "--accuracy", accuracy, "--json")
    )
    cases = json.loads(done.stdout)["golden"]["cases"]
    assert len(cases) == 7
    for result in cases:
        assert result["prompt_equal"]
        if accuracy == "exact":
            assert result["max_abs_error"] <= 2e-3
            assert result["greedy_equal"] == result["greedy_stated"]
        else:
            assert result["kl"] <= LIMITS["default"].kl


@pytest.mark.slow
def test_real_bundle_with_a_flipped_byte_fails(
    run_cli: RunCli, smollm2_bundle: Path, tmp_path: Path
) -> None:
    """Opening checks sizes and small files only; this is what finds a bad byte in the weights."""
    bundle = tmp_path / "bundle"
    shutil.copytree(smollm2_bundle, bundle, ignore=shutil.ignore_patterns(".packed"))
    with (bundle / "weights.bin").open("r+b") as file:
        file.seek(50_000_000)
        byte = file.read(1)
        file.seek(50_000_000)
        file.write(bytes([byte[0] ^ 0x40]))
    done = run_cli("verify", bundle, check=False)
    assert done.returncode == 1
    assert "weights.bin: SHA-256 is " in done.stderr
