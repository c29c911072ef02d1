"""What the engine keeps on a mock model: pages of free slots, prefixes of earlier prompts."""

from __future__ import annotations

import pytest
from engine_requests import assert_empty, drain, request, tokens
from mock_engine import MockModel, mock_engine

from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.life import RequestHandle

# Pages.


def spied_discards(model: MockModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Arguments of the calls that give pages back."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(model.cache, "discard", lambda *args: calls.append(args))
    return calls


def finish(engine: Engine, handle: RequestHandle) -> None:
    while not handle.done:
        engine.step()


def test_a_slot_keeps_its_pages_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returning and touching them again costs short requests time; an idle engine keeps none."""
    engine, model = mock_engine(slots=2)
    calls = spied_discards(model, monkeypatch)
    engine.submit(request(8, max_tokens=80))
    for _ in range(5):
        finish(engine, engine.submit(request(8, max_tokens=2)))
    assert calls == [(1, 10, 8)] * 4  # what the newcomer does not count for
    drain(engine)
    assert {slot for slot, *_ in calls} == {0, 1}


def test_a_slot_that_nobody_takes_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory must follow what runs, also under a load that has become small."""
    engine, model = mock_engine(slots=2)
    calls = spied_discards(model, monkeypatch)
    engine.submit(request(4, max_tokens=80))
    finish(engine, engine.submit(request(30, max_tokens=2)))
    assert calls == []
    for _ in range(40):
        engine.step()
    assert calls == [(1, 32)]


def test_kept_pages_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is what the memory holds, whoever the tokens belonged to."""
    engine, model = mock_engine(slots=2, kv_budget=92)
    calls = spied_discards(model, monkeypatch)
    running = engine.submit(request(30, max_tokens=60))
    finish(engine, engine.submit(request(30, max_tokens=2)))
    while 30 + len(tokens(running)) + 32 <= 92:
        assert calls == []
        engine.step()
    assert calls == [(1, 32)]


# Prefixes.


def test_cached_tokens_are_told_apart() -> None:
    """llama.cpp#26676: usage counts what was really processed."""
    engine, _ = mock_engine(prefix_blocks=20)
    cached = []
    for prompt in (40, 40, 80, 32, 33, 17, 16):
        handle = engine.submit(request(prompt))
        drain(engine)
        usage = handle.events[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == prompt
        cached.append(usage.cached_tokens)
    # Whole blocks of 16, but for the last two tokens, which always run again (rule 1a).
    assert cached == [0, 32, 32, 30, 31, 15, 14]


def test_a_cancelled_prompt_leaves_what_was_read_of_it() -> None:
    """Storing a long prompt at its end alone would stall the running rows, and waste this."""
    engine, _ = mock_engine(prefix_blocks=20, prefill_chunk=32)
    handle = engine.submit(request(90))
    engine.step()
    engine.cancel(handle)
    assert_empty(engine)
    again = engine.submit(request(90))
    drain(engine)
    usage = again.events[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 32


def test_a_prompt_longer_than_the_cache_is_kept_as_far_as_it_fits() -> None:
    """Its own blocks are held while it is read; room for more must come from others."""
    engine, _ = mock_engine(prefix_blocks=3, prefill_chunk=16)
    for prompt, expected in ((20, 0), (90, 16), (90, 48)):
        handle = engine.submit(request(prompt))
        drain(engine)
        usage = handle.events[-1].usage
        assert usage is not None
        assert usage.cached_tokens == expected
    assert_empty(engine)


def test_tenants_share_nothing() -> None:
    """vllm#16016: how fast an answer comes must not tell what others asked."""
    engine, _ = mock_engine(prefix_blocks=20)
    for salt, expected in (("a", 0), ("b", 0), ("a", 32)):
        handle = engine.submit(request(40, salt=salt))
        drain(engine)
        usage = handle.events[-1].usage
        assert usage is not None
        assert usage.cached_tokens == expected


def test_least_recently_used_prefix_goes_first() -> None:
    engine, _ = mock_engine(prefix_blocks=4)
    prompts = [[5 + kind] * 40 for kind in range(3)]
    for kind in (0, 1, 0, 2, 0, 1):
        handle = engine.submit(request(prompts[kind]))
        drain(engine)
        usage = handle.events[-1].usage
        assert usage is not None
        found = usage.cached_tokens
    assert found == 0  # 1 made room for 2
    stats = engine.stats()
    assert stats.prefix_hit_tokens == 64
    assert stats.prefix_blocks == stats.prefix_capacity_blocks == 4
