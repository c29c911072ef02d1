"""The life of requests on a mock model: who runs, who waits, what is freed, what is refused."""

from __future__ import annotations

import pytest
from mock_engine import CONTEXT, END, NAN, RAISES, MockModel, mock_engine

from ortolan.errors import (
    CancelledError,
    EngineError,
    OverloadedError,
    RequestError,
    TimedOutError,
)
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.life import RequestHandle, State
from ortolan.runtime.params import Request, SamplingParams


def request(prompt: int | list[int], max_tokens: int = 8, **settings: object) -> Request:
    """A greedy request that runs to its limit; `prompt` may be a length."""
    ids = [5 + i % 40 for i in range(prompt)] if isinstance(prompt, int) else prompt
    own = {k: settings.pop(k) for k in ("n", "logprobs", "prompt_logprobs") if k in settings}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **own)  # type: ignore[arg-type]
    return Request(ids, params, **settings)  # type: ignore[arg-type]


def drain(engine: Engine, most: int = 1000) -> None:
    for _ in range(most):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


def tokens(handle: RequestHandle, choice: int = 0) -> list[int]:
    return [i for e in handle.events if e.choice == choice for i in e.token_ids]


def states(*handles: RequestHandle) -> list[State]:
    return [handle.choices[0].state for handle in handles]


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)


# Refusals.


@pytest.mark.parametrize(
    ("prompt", "budget", "said"),
    [
        ([], 400, "the prompt is empty"),
        ([4, 50], 400, "token id 50; the model's ids are 0 to 49"),
        (CONTEXT + 1, 400, f"has {CONTEXT + 1} tokens; the context holds {CONTEXT}"),
        (41, 40, "has 41 tokens; the KV budget holds 40"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(
    prompt: int | list[int], budget: int, said: str
) -> None:
    """llama.cpp#17284, vllm#39734: with both numbers, and nothing waits forever."""
    engine, _ = mock_engine(kv_budget=budget)
    with pytest.raises(RequestError, match=said):
        engine.submit(request(prompt))
    assert not engine.step()


def test_full_queue_says_when_to_try_again() -> None:
    """vllm#49445: at once, rather than after a wait."""
    engine, _ = mock_engine(slots=1, max_waiting=2, max_waiting_tokens=1000)
    handles = [engine.submit(request(5)) for _ in range(2)]
    with pytest.raises(OverloadedError, match=r"2 requests are waiting.*at most 2") as caught:
        engine.submit(request(5))
    assert caught.value.retry_after_s >= 1
    engine.step()
    handles.append(engine.submit(request(5)))
    drain(engine)
    assert all(len(tokens(handle)) == 8 for handle in handles)


def test_waiting_tokens_are_capped_too() -> None:
    engine, _ = mock_engine(slots=1, max_waiting_tokens=20)
    engine.submit(request(15))
    with pytest.raises(OverloadedError, match=r"15 prompt tokens are waiting, and at most 20"):
        engine.submit(request(6))


# Order.


def test_first_come_first_served() -> None:
    engine, _ = mock_engine(slots=1)
    handles = [engine.submit(request(4, max_tokens=2)) for _ in range(3)]
    order = []
    while engine.step():
        order += [i for i, handle in enumerate(handles) if handle.done and i not in order]
    assert order[:2] == [0, 1]


def test_better_priority_goes_first() -> None:
    engine, _ = mock_engine(slots=1)
    engine.submit(request(4))
    engine.step()
    low, high = engine.submit(request(4, priority=1)), engine.submit(request(4, priority=-1))
    while states(high) == [State.WAITING]:
        engine.step()
    assert states(low) == [State.WAITING]
    drain(engine)
    assert low.done
    assert high.done


@pytest.mark.parametrize("patience", [0, 3])
def test_nobody_is_overtaken_more_often_than_stated(patience: int) -> None:
    """A stream of urgent requests must not starve the others."""
    engine, _ = mock_engine(slots=1, priority_patience=patience)
    engine.submit(request(4, max_tokens=1, priority=0))
    low = engine.submit(request(4, max_tokens=1, priority=5))
    overtaking = [engine.submit(request(4, max_tokens=1, priority=0)) for _ in range(9)]
    while not low.done:
        engine.step()
        overtaking.append(engine.submit(request(4, max_tokens=1, priority=0)))
    assert sum(handle.done for handle in overtaking) == patience


# Budget and preemption.


def test_the_youngest_of_the_worst_priority_is_preempted() -> None:
    """Growing answers must not outgrow the memory, and the oldest must get to its end."""
    engine, _ = mock_engine(slots=3, kv_budget=CONTEXT)
    urgent = engine.submit(request(4, max_tokens=60, priority=-1))
    old = engine.submit(request(4, max_tokens=60))
    young = engine.submit(request(4, max_tokens=60))
    seen = []
    while engine.step():
        stats = engine.stats()
        assert stats.kv_tokens <= stats.kv_budget_tokens + 3  # one more each, until the next step
        seen += [
            h for h in (urgent, old, young) if states(h) == [State.PREEMPTED] and h not in seen
        ]
    assert seen == [young, old]
    assert engine.stats().preemptions >= 2
    assert_empty(engine)
    # With the bits that they would have had alone (rule 1c).
    for handle in (urgent, old, young):
        alone, _ = mock_engine(slots=1)
        expected = alone.submit(request(4, max_tokens=60))
        drain(alone)
        assert tokens(handle) == tokens(expected)


def test_a_small_budget_is_the_context() -> None:
    """An answer ends where the budget does, with the reason that says so."""
    engine, _ = mock_engine(kv_budget=20)
    handle = engine.submit(request(10, max_tokens=50))
    drain(engine)
    assert len(tokens(handle)) == 11
    assert handle.events[-1].finish_reason == "length"


# Several answers.


def test_choices_share_one_prefill() -> None:
    engine, model = mock_engine(slots=3)
    handle = engine.submit(request(40, n=3))
    drain(engine)
    assert len(model.prefill_rows) == 1
    assert engine.stats().prompt_tokens == 40
    assert tokens(handle, 0) == tokens(handle, 1) == tokens(handle, 2)  # greedy
    assert len(tokens(handle)) == 8


def test_choices_without_room_wait_for_it() -> None:
    engine, _ = mock_engine(slots=2, prefix_blocks=20)
    handle = engine.submit(request(40, n=5))
    assert engine.stats().waiting == 5
    drain(engine)
    assert all(tokens(handle, index) == tokens(handle, 0) for index in range(5))
    assert_empty(engine)


def test_cancelling_ends_every_choice() -> None:
    """llama.cpp#24496: waiting or running, for every one of n choices."""
    for steps in range(6):
        engine, _ = mock_engine(slots=2, prefill_chunk=16)
        handle = engine.submit(request(40, n=3))
        other = engine.submit(request(4))
        for _ in range(steps):
            engine.step()
        engine.cancel(handle)
        engine.cancel(handle)  # twice is harmless (triton#7368)
        assert isinstance(handle.error, CancelledError)
        assert {c.state for c in handle.choices} == {State.CANCELLED}
        drain(engine)
        assert len(tokens(other)) == 8
        assert_empty(engine)
        engine.cancel(other)  # after the end, too
        assert other.error is None


# Deadlines.


def test_time_over_ends_a_request_wherever_it_is() -> None:
    engine, model = mock_engine(slots=1)
    running = engine.submit(request(4, max_tokens=80, timeout_s=0.2))
    waiting = engine.submit(request(4, timeout_s=0.1))
    patient = engine.submit(request(4))
    drain(engine)
    for handle in (running, waiting):
        assert isinstance(handle.error, TimedOutError)
        assert states(handle) == [State.TIMED_OUT]
    assert 0 < len(tokens(running)) < 25
    assert tokens(waiting) == []
    assert len(tokens(patient)) == 8
    assert model.clock.now < 101


# Pace.


@pytest.mark.parametrize("gap_steps", [2.0, 4.0, 8.0])
def test_a_long_prompt_does_not_stall_running_requests(gap_steps: float) -> None:
    """The gap between tokens has the bound that the config states (here in time of the mock)."""
    engine, model = mock_engine(slots=3, gap_steps=gap_steps, prefill_chunk=64)
    running = engine.submit(request(4, max_tokens=80))
    for _ in range(5):
        engine.step()
    late = engine.submit(request(90, max_tokens=2))
    gaps, last, seen = [], model.clock.now, len(tokens(running))
    while not late.done:
        engine.step()
        assert len(tokens(running)) == seen + 1  # a token in every step
        gaps.append(model.clock.now - last)
        last, seen = model.clock.now, seen + 1
    assert max(gaps) <= gap_steps * model.plain_s
    assert max(gaps) > 0.5 * gap_steps * model.plain_s or gap_steps == 8.0  # and it is used


def test_a_gap_in_milliseconds_binds_too() -> None:
    engine, model = mock_engine(slots=3, gap_ms=22.0, prefill_chunk=64)
    engine.submit(request(4, max_tokens=80))
    for _ in range(5):
        engine.step()
    late = engine.submit(request(90, max_tokens=2))
    while not late.done:
        began = model.clock.now
        engine.step()
        assert model.clock.now - began <= 0.022


def test_without_running_requests_a_whole_chunk_is_read() -> None:
    engine, model = mock_engine(prefill_chunk=64)
    engine.submit(request(90))
    engine.step()
    assert model.largest_call == 64


# Prefill in company.


def test_short_prompts_share_a_call() -> None:
    engine, model = mock_engine(slots=4)
    for length in (10, 11, 12, 30):
        engine.submit(request(length))
    engine.step()
    assert sorted(model.prefill_rows) == [1, 3]


def test_a_provider_without_ragged_prefill_reads_them_one_by_one() -> None:
    engine, model = mock_engine(slots=4, ragged=False)
    for length in (10, 11, 12):
        engine.submit(request(length))
    drain(engine)
    assert set(model.prefill_rows) == {1}


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


# Failures.


def test_nan_ends_one_request_and_leaves_nothing_of_it() -> None:
    """sglang#33187: the others go on, and nobody finds its KV."""
    engine, _ = mock_engine(prefix_blocks=20)
    good = engine.submit(request(20))
    stem = [6] * 16
    bad = engine.submit(request([*stem, NAN, *stem]))
    drain(engine)
    assert isinstance(bad.error, EngineError)
    assert states(good, bad) == [State.FINISHED, State.FAILED]
    again = engine.submit(request([*stem, 7, 7]))
    drain(engine)
    usage = again.events[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0
    assert engine.stats().broken is None
    assert_empty(engine)


def test_nan_late_in_a_long_prompt_leaves_only_what_was_before_it() -> None:
    """A prompt's KV is stored as it is read; what comes after a NaN must not be."""
    engine, _ = mock_engine(prefix_blocks=20, prefill_chunk=16)
    stem = [6] * 40
    bad = engine.submit(request([*stem, NAN, *[7] * 40]))
    drain(engine)
    assert states(bad) == [State.FAILED]
    again = engine.submit(request([*stem, 8, 8, *[7] * 40]))
    drain(engine)
    usage = again.events[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 32  # the block that holds the NaN is not there
    assert engine.stats().prefix_blocks == 5
    assert_empty(engine)


def test_nan_while_decoding_ends_one_request() -> None:
    engine, model = mock_engine()
    good, bad = engine.submit(request(20)), engine.submit(request(21))
    engine.step()
    slot = bad.choices[0].slot
    model.cache.array[0, slot, 0, 3, 0] = NAN
    drain(engine)
    assert states(good, bad) == [State.FINISHED, State.FAILED]
    assert len(tokens(good)) == 8


@pytest.mark.parametrize("min_rows", [1, 2])
def test_a_prefill_that_raises_ends_its_request_alone(min_rows: int) -> None:
    engine, _ = mock_engine(min_rows=min_rows)
    handles = [engine.submit(request(ids)) for ids in ([5] * 9, [6, 6, RAISES], [7] * 9, [8] * 9)]
    drain(engine)
    assert [handle.error is None for handle in handles] == [True, False, True, True]
    assert engine.stats().broken is None
    assert_empty(engine)


@pytest.mark.parametrize("min_rows", [1, 2])
def test_a_decode_that_raises_ends_its_request_alone(min_rows: int) -> None:
    engine, _ = mock_engine(min_rows=min_rows)
    good = engine.submit(request(9, max_tokens=20))
    bad = engine.submit(
        Request([6] * 4, SamplingParams(temperature=0, max_tokens=9, logit_bias={RAISES: 100.0}))
    )
    also_good = engine.submit(request([7] * 9, max_tokens=20))
    drain(engine)
    assert bad.error is not None
    assert tokens(bad) == [RAISES]
    for handle in (good, also_good):
        alone, _ = mock_engine(slots=1, min_rows=min_rows)
        expected = alone.submit(handle.request)
        drain(alone)
        assert tokens(handle) == tokens(expected)
    assert engine.stats().broken is None


def test_bad_requests_in_a_row_do_not_break_the_engine() -> None:
    """Whoever finds a prompt that fails must not stop the server with three of them."""
    engine, _ = mock_engine()
    for _ in range(5):
        bad = engine.submit(request([6, 6, RAISES]))
        drain(engine)
        assert isinstance(bad.error, EngineError)
    good = engine.submit(request(9))
    drain(engine)
    assert good.error is None
    assert engine.stats().broken is None


def test_a_broken_session_ends_everything_and_says_so() -> None:
    """vllm#52852: every stream ends with a reason, and new requests are refused."""
    engine, model = mock_engine(slots=4)
    handles = [engine.submit(request(9, n=2)) for _ in range(5)]
    engine.step()
    model.broken = True
    drain(engine)
    assert all(isinstance(handle.error, EngineError) for handle in handles)
    assert engine.stats().broken == "the mock session broke"
    assert_empty(engine)
    with pytest.raises(EngineError, match="the mock session broke"):
        engine.submit(request(3))


# Ends.


def test_an_end_token_ends_an_answer() -> None:
    engine, _ = mock_engine()
    params = SamplingParams(temperature=0, logit_bias={END: 100.0})
    handle = engine.submit(Request([5], params))
    drain(engine)
    assert tokens(handle) == [END]
    assert handle.events[-1].finish_reason == "stop"
    assert engine.stats().ended == {"stop": 1}


def test_no_tokens_with_logprobs_scores_the_prompt() -> None:
    """vllm#6521: max_tokens 0 with echo."""
    engine, model = mock_engine()
    handle = engine.submit(request(70, max_tokens=0, prompt_logprobs=0))
    drain(engine)
    (event,) = handle.events
    assert event.token_ids == ()
    assert event.finish_reason == "length"
    scores = event.prompt_logprobs
    assert scores[0] is None
    assert [score.chosen.token_id for score in scores[1:] if score] == handle.request.prompt_ids[1:]
    assert model.largest_call <= 64


def test_stream_that_is_not_read_to_its_end_frees_its_slot() -> None:
    engine, _ = mock_engine()
    stream = engine.stream(request(9))
    next(stream)
    assert engine.stats().running == 1
    stream.close()
    assert_empty(engine)
