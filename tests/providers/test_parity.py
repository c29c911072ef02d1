"""A provider gives the CPU's answers, whatever requests come together and however they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from provider_scenarios import SCENARIOS, ask, logits_of

from ortolan.runtime.reference import kl_divergence

# With float32 activations providers differ by the order in which they add. Measured: logits of the
# tiny checkpoints (up to 40 in size) were at most 3e-5 apart, SmolLM2's 3.4e-4, on OpenVINO and
# SwiftShader alike; what was wrong was off by 0.07 and more.
LOGITS_ATOL = 2e-3
# int8 activations: see LIMITS in runtime/reference.py. Measured: at most 3.3e-4 on the tiny ones,
# 0.007 for the middle row of SmolLM2's; one of its rows, seven tokens of gibberish, has 0.25 on the
# CPU, so the middle row is judged.
DEFAULT_KL = 0.05

Opened = Callable[..., Any]
Expected = Callable[[Path], dict[str, Any]]


@pytest.mark.parametrize("name", SCENARIOS)
def test_answers_are_the_cpus(bundle: Path, name: str, opened: Opened, expected: Expected) -> None:
    """Tokens, reasons and log-probabilities; a slot moved or forked wrongly would show here."""
    scenario = SCENARIOS[name]
    llm = opened(bundle, **scenario.settings)
    found, wanted = ask(llm, scenario), expected(bundle)[name]
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in wanted]
    assert [one["finish_reason"] for one in found] == [one["finish_reason"] for one in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine["logprobs"], theirs["logprobs"], atol=LOGITS_ATOL)
        pairs = zip(mine.get("prompt_logprobs", []), theirs.get("prompt_logprobs", []), strict=True)
        for one, other in pairs:
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(one, other, atol=LOGITS_ATOL)
    if name == "preempted":
        assert llm._running().stats().preemptions > 0


def test_logits_are_the_cpus(bundle: Path, opened: Opened) -> None:
    """Greedy tokens hide an error until it turns the order of two."""
    found = logits_of(opened(bundle))
    with np.load(bundle.with_name(f"{bundle.name}.npz")) as wanted:
        for name, logits in found.items():
            np.testing.assert_allclose(logits, wanted[name], atol=LOGITS_ATOL)


def test_default_accuracy_stays_close(bundle: Path, opened: Opened) -> None:
    """A provider may round activations to int8, or not; it may not lose more by it."""
    found = logits_of(opened(bundle, accuracy="default"))
    with np.load(bundle.with_name(f"{bundle.name}.npz")) as wanted:
        rows = [
            kl_divergence(one, other)
            for name, logits in found.items()
            for one, other in zip(wanted[name], logits, strict=True)
        ]
    assert np.median(rows) < DEFAULT_KL
