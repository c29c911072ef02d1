"""The real model against an implementation that is not ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ortolan.cli.golden import check_case, read_golden
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.reference import LIMITS, kl_divergence

CASES = (
    "short_factual",
    "long",
    "structured_output",
    "repetition_stress",
    "plain_completion",
    "code",
    "unicode",
)


@pytest.fixture(scope="module")
def exact(smollm2_bundle: Path) -> Iterator[LLM]:
    config = EngineConfig(accuracy="exact", max_slots=1, max_context=1024)
    with LLM(Bundle.open(smollm2_bundle), config) as llm:
        yield llm


@pytest.fixture(scope="module")
def default(smollm2_bundle: Path) -> Iterator[LLM]:
    with LLM(Bundle.open(smollm2_bundle), EngineConfig(max_slots=1, max_context=1024)) as llm:
        yield llm


def test_every_golden_case_is_tested(shared: Path) -> None:
    """A case that is added to the file must not be left out here."""
    _, cases = read_golden(shared / "golden" / "smollm2.json")
    assert {case.name for case in cases} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_exact_logits_are_the_references(exact: LLM, shared: Path, name: str) -> None:
    """`--accuracy exact` promises the checkpoint's own numbers."""
    _, cases = read_golden(shared / "golden" / "smollm2.json")
    case = next(case for case in cases if case.name == name)
    assert case.last_logits is not None
    last = len(case.prompt_ids) - 1
    assert np.abs(exact.logits(case.prompt_ids, [last])[0] - case.last_logits).max() < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_exact_greedy_tokens_are_the_references(exact: LLM, shared: Path, name: str) -> None:
    """Cached decode must follow the reference for as long as the gap between logits says it can."""
    _, cases = read_golden(shared / "golden" / "smollm2.json")
    result = check_case(exact, next(c for c in cases if c.name == name), LIMITS["exact"])
    assert not result.failures
    assert result.greedy_owed == result.greedy_stated


@pytest.mark.parametrize("name", CASES)
def test_default_accuracy_passes_verification(default: LLM, shared: Path, name: str) -> None:
    """int8 activations may cost a little, and no more."""
    _, cases = read_golden(shared / "golden" / "smollm2.json")
    result = check_case(default, next(c for c in cases if c.name == name), LIMITS["default"])
    assert not result.failures


def test_default_accuracy_is_close_to_exact_on_a_text(default: LLM, exact: LLM, root: Path) -> None:
    """The stated price of int8 activations: mean KL at most 0.006 over 1,000 tokens."""
    text = (root / "ortolan" / "heldout.txt").read_text(encoding="utf-8")
    ids = default.encode(text)[:1000]
    assert len(ids) == 1000
    reference, ours = exact.logits(ids), default.logits(ids)
    divergences = [kl_divergence(p, q) for p, q in zip(reference, ours, strict=True)]
    assert 0 < np.mean(divergences) <= 0.006


@pytest.mark.slow
def test_float32_bundle_equals_the_exact_source_bundle(
    exact: LLM, run_cli, root: Path, tmp_path: Path
) -> None:
    """`--weights float32` stores other bytes for the same numbers."""
    bundle = tmp_path / "float32"
    run_cli("export", "smollm2", bundle, "--weights", "float32", "--max-context", "1024")
    text = (root / "ortolan" / "heldout.txt").read_text(encoding="utf-8")
    ids = exact.encode(text)[:300]
    with LLM(Bundle.open(bundle), EngineConfig(max_slots=1)) as llm:
        assert np.abs(llm.logits(ids) - exact.logits(ids)).max() < 2e-3
