"""A provider that computes wrongly is found before anybody is served by it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ortolan.errors import EngineError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.opening import open_engine
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.reference import (
    LIMITS,
    Limits,
    compare,
    expected_by_cpu,
    failures_of,
    self_test,
)
from ortolan.runtime.serve.service import Service
from ortolan.runtime.text.no_tokenizer import NoTokenizer, open_tokenizer

CONFIG = EngineConfig(max_slots=4, max_context=64, prefix_cache_mb=0)


@pytest.mark.parametrize("limits", [{}, {"max_slots": 1, "max_waiting": 1}], ids=["", "small"])
def test_the_cpu_agrees_with_itself(tiny_bundle: Path, limits: dict[str, int]) -> None:
    """Every prompt is judged, on tokens too: a comparison that owes nothing says nothing.

    However few requests the server's settings let wait.
    """
    bundle, config = Bundle.open(tiny_bundle), dataclasses.replace(CONFIG, **limits)
    tokenizer = open_tokenizer(bundle)
    cases = expected_by_cpu(bundle, config, tokenizer)
    outcomes = compare(open_engine(bundle, config, tokenizer), cases, LIMITS["default"])
    assert [one.failures for one in outcomes] == [()] * 3
    assert len({len(case.prompt_ids) for case in cases}) == 3
    assert sum(one.greedy_owed for one in outcomes) > 3
    assert all(one.greedy_equal == one.greedy_owed for one in outcomes)


def test_a_bundle_without_a_tokenizer_is_compared_too(tiny_bundle: Path) -> None:
    """Ids are at hand where texts are not."""
    bundle = Bundle.open(tiny_bundle)
    vocab_size = bundle.manifest.model.vocab_size
    cases = expected_by_cpu(bundle, CONFIG, NoTokenizer())
    assert [len(case.prompt_ids) for case in cases] == [5, 12, 40]
    assert all(0 <= i < vocab_size for case in cases for i in case.prompt_ids)


def test_wrong_logits_keep_a_server_from_saying_ready(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of such a provider look like answers."""
    bundle = Bundle.open(tiny_bundle)
    cases = expected_by_cpu(bundle, CONFIG, open_tokenizer(bundle))
    monkeypatch.setattr("ortolan.runtime.serve.service.expected_by_cpu", lambda *args: cases)
    prefill = Model.prefill

    def off(self: Model, *args: object) -> object:
        logits = prefill(self, *args)  # type: ignore[arg-type]
        logits[..., 7] += 20
        return logits

    right = Service(bundle, CONFIG, load=False, self_test=True)
    asyncio.run(warm(right))
    monkeypatch.setattr(Model, "prefill", off)
    wrong = Service(bundle, CONFIG, load=False, self_test=True)
    with pytest.raises(EngineError, match="provider cpu does not compute what the CPU does"):
        asyncio.run(warm(wrong))
    untested = Service(bundle, CONFIG, load=False)
    asyncio.run(warm(untested))


async def warm(service: Service) -> None:
    try:
        await service.warm_up()
        assert service.not_ready is None
    finally:
        await service.close()


def test_wrong_decode_is_found_by_its_tokens(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits after the prompt are right; what follows is another thing."""
    bundle = Bundle.open(tiny_bundle)
    tokenizer = open_tokenizer(bundle)
    cases = expected_by_cpu(bundle, CONFIG, tokenizer)
    monkeypatch.setattr(
        Model,
        "decode",
        lambda self, first, ids, lengths: np.eye(
            len(ids), self.config.vocab_size, dtype=np.float32
        ),
    )
    with pytest.raises(EngineError, match=r"greedy token \d+ is \d+, expected"):
        self_test(open_engine(bundle, CONFIG, tokenizer), cases, CONFIG)


def test_nan_is_a_failure() -> None:
    """It compares as neither larger nor smaller."""
    limits = Limits(max_abs_error=1.0, kl=1.0)
    assert len(failures_of(limits, float("nan"), float("nan"), [], [])) == 2
    assert failures_of(limits, 0.5, None, [1, 2], [1, 2, 3]) == []
    assert failures_of(limits, 0.5, 0.5, [1, 2], [1]) == ["greedy token 1 is missing, expected 2"]
