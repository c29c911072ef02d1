"""Accuracy reports of the real model, within bounds that were measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mean_kl", "top1"),
    [
        ((), 0.006, 0.95),
        (("--weights", "int8"), 0.007, 0.94),
        (("--weights", "int4", "--asymmetric", "--embedding", "source"), 0.006, 0.95),
        (("--weights", "int4"), 0.6, 0.55),
    ],
)
def test_real_model_within_measured_bounds(
    run_cli: RunCli, tmp_path: Path, options: tuple[str, ...], mean_kl: float, top1: float
) -> None:
    """SmolLM2's Q4_1 weights as they are, in 8 bits, and rounded again to 4: what was measured."""
    done = run_cli("export", "smollm2", tmp_path / "bundle", *options, "--json")
    (report,) = json.loads(done.stdout)["accuracy_reports"]
    assert 1000 <= report["total"]["tokens"] <= 1024
    assert 0 < report["total"]["mean_kl"] <= mean_kl
    assert report["total"]["top1_agreement"] >= top1
    assert report["total"]["reference_perplexity"] == pytest.approx(24.56, abs=0.05)
