"""On the real model: a request's tokens and logprobs are those it has alone, whatever else runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortolan.errors import CancelledError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.life import RequestHandle
from ortolan.runtime.engine.opening import open_engine
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

REQUESTS = 40


@pytest.fixture(scope="module")
def tokenizer(smollm2_bundle: Path) -> Tokenizer:
    return Tokenizer.open(smollm2_bundle)


@pytest.fixture(
    scope="module",
    params=[
        ("default", 64, 400),  # budget tight enough to preempt
        ("default", 0, 400),
        ("default", 64, 100_000),
        ("exact", 64, 400),
    ],
    ids=["prefixes", "no prefixes", "wide budget", "exact"],
)
def engine(
    request: pytest.FixtureRequest, smollm2_bundle: Path, tokenizer: Tokenizer
) -> Iterator[Engine]:
    accuracy, prefix_cache_mb, kv_tokens = request.param
    config = EngineConfig(
        max_context=400,
        max_slots=8,
        prefill_chunk=96,
        accuracy=accuracy,
        prefix_cache_mb=prefix_cache_mb,
        kv_tokens=kv_tokens,
        priority_patience=4,
    )
    return open_engine(Bundle.open(smollm2_bundle), config, tokenizer, checks=True)


def random_request(chance: random.Random, ids: list[int], most: int) -> Request:
    """Prompts are pieces of one text, which begin alike often."""
    start = chance.choice([0, 0, 0, 500, chance.randrange(1000)])
    params = SamplingParams(
        max_tokens=chance.randint(1, most),
        temperature=chance.choice([0.0, 0.7, 1.0, 1.5]),
        top_k=chance.choice([0, 0, 5, 40]),
        top_p=chance.choice([1.0, 0.9, 0.5]),
        min_p=chance.choice([0.0, 0.05]),
        repetition_penalty=chance.choice([1.0, 1.2]),
        presence_penalty=chance.choice([0.0, 0.6]),
        frequency_penalty=chance.choice([0.0, 0.3]),
        logit_bias={chance.randrange(40_000): chance.choice([-100.0, 3.0])},
        seed=chance.randrange(2**40),
        n=chance.choice([1, 1, 1, 1, 3]),
        logprobs=chance.choice([None, 0, 5]),
        prompt_logprobs=chance.choice([None, None, None, None, 2]),
        ignore_eos=chance.random() < 0.7,
    )
    length = chance.choice([1, 2, 17, 33, chance.randint(3, 200), chance.randint(3, 200)])
    return Request(ids[start : start + length], params, priority=chance.choice([0, 0, 1]))


def said(handle: RequestHandle) -> dict[int, list[object]]:
    """Choice -> tokens, text, logprobs and reasons, bit for bit."""
    found: dict[int, list[object]] = {}
    for e in handle.events:
        event = (e.token_ids, e.text, e.logprobs, e.prompt_logprobs, e.finish_reason)
        found.setdefault(e.choice, []).append(event)
    return found


def run_all(engine: Engine, requests: list[Request], chance: random.Random) -> list[RequestHandle]:
    """Arrivals, cancellations and steps in a random order."""
    handles: list[RequestHandle] = []
    for request in requests:
        handles.append(engine.submit(request))
        if chance.random() < 0.15:
            for _ in range(chance.randint(0, 3)):
                engine.step()
            engine.cancel(chance.choice(handles))
        for _ in range(chance.choice([0, 0, 1, 2, 8])):
            engine.step()
    while engine.step():
        pass
    return handles


def test_same_request_same_bits(
    engine: Engine, tokenizer: Tokenizer, root: Path, request: pytest.FixtureRequest
) -> None:
    """Temperature 0, or a seed, gives the same tokens whatever else is running (vllm#23138)."""
    text = (root / "ortolan" / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)[:1500]
    chance = random.Random(11)
    exact = "exact" in request.node.name  # slower by an order of magnitude
    requests = [
        random_request(chance, ids, most=12 if exact else 90)
        for _ in range(12 if exact else REQUESTS)
    ]
    together = run_all(engine, requests, chance)
    if "budget" not in request.node.name and not exact:
        assert engine.stats().preemptions > 0
    for handle in together:
        engine.forget_prefixes()
        alone = engine.submit(handle.request)
        while engine.step():
            pass
        found, expected = said(handle), said(alone)
        if isinstance(handle.error, CancelledError):
            for choice, events in found.items():
                assert events == expected[choice][: len(events)]
        else:
            assert handle.error is None
            assert found == expected
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)
    assert {"stop", "length", "cancelled"} >= stats.ended.keys()
