"""The check of a provider on somebody's machine, run dry on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

QUICK = ("--batch", "1,2", "--prompt", "8", "--context", "4", "--repeat", "2")


@pytest.fixture(scope="module")
def kit(tiny_bundle: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of one tiny bundle. Its wheels are left out: this environment has all that it needs."""
    folder = tmp_path_factory.mktemp("kit") / "kit"
    script = root / "benchmarks" / "make_check_kit.py"
    subprocess.run([sys.executable, script, folder, tiny_bundle, "--no-wheel"], check=True)
    return folder


def check(kit: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """cuda_check.sh on the CPU, as somebody who was given the kit runs it."""
    return subprocess.run(
        ["bash", kit / "cuda_check.sh", kit, *QUICK, *more],
        cwd=kit.parent,
        env={**os.environ, "PROVIDER": "cpu", "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_check_compares_and_times_what_the_kit_brings(kit: Path) -> None:
    """A GPU is lent for minutes: a script that fails there for its own reasons has wasted them."""
    done = check(kit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu: PASS" in done.stdout
    found = json.loads((kit / "report.json").read_text())
    assert [step["kind"] for step in found["steps"]] == ["parity", "parity", "speed"]
    exact, default, speed = found["steps"]
    assert max(one["max_abs_error"] for one in exact["outcomes"]) < 1e-5
    assert all(one["greedy_owed"] for one in exact["outcomes"])
    assert not default["failures"]
    assert {row["phase"] for row in speed["results"]} == {"prefill", "decode"}
    # Its bundle is as small as what is carried: without what one processor packed.
    assert not list((kit / "bundles").glob("*/*packed*"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_wrong_results_fail_the_check(kit: Path, tmp_path: Path) -> None:
    """The one thing that it is for."""
    spoilt = tmp_path / "kit"
    shutil.copytree(kit, spoilt)
    (path,) = (spoilt / "references").glob("*.npz")
    with np.load(path) as logits:
        changed = {name: values + 0.5 * (values > 0) for name, values in logits.items()}
    np.savez(path, **changed)
    done = check(spoilt)
    assert done.returncode == 1
    assert "logits are off by" in done.stdout
    assert "cpu: FAIL" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_check_ends_when_its_time_is_over(kit: Path) -> None:
    """What was not compared is not passed."""
    done = check(kit, LIMIT_S="0")
    assert done.returncode == 1
    assert "the time is over" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_folder_that_is_no_kit_is_one_sentence(kit: Path, tmp_path: Path) -> None:
    """With the command that makes one."""
    done = subprocess.run(
        ["bash", kit / "cuda_check.sh", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "is no kit; make one: python benchmarks/make_check_kit.py" in done.stderr


def test_provider_that_captures_is_checked_with_and_without(kit: Path, tmp_path: Path) -> None:
    """Recorded calls fail in their own ways; and a provider that is not here has not passed."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, kit / "check_provider.py", kit, "--provider", "cuda"),
            *(*QUICK, "--report", report),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cuda: FAIL" in done.stdout
    steps = json.loads(report.read_text())["steps"]
    kinds = [(step["kind"], "recorded" in step["name"]) for step in steps]
    assert kinds == [("parity", False)] * 2 + [("parity", True)] * 2 + [
        ("speed", False),
        ("speed", True),
    ]
    assert all(step["failures"] for step in steps)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_script_is_free_of_the_shell_s_traps(root: Path) -> None:
    """It runs where nobody can correct it."""
    subprocess.run(["shellcheck", root / "benchmarks" / "cuda_check.sh"], check=True)
