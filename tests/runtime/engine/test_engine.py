"""The life of requests on a mock model: who runs, who waits, what is refused, how it ends."""

from __future__ import annotations

import pytest
from engine_requests import assert_empty, drain, request, states, tokens
from mock_engine import CONTEXT, END, mock_engine

from ortolan.errors import (
    CancelledError,
    OverloadedError,
    RequestError,
    TimedOutError,
)
from ortolan.runtime.engine.life import State
from ortolan.runtime.params import Request, SamplingParams

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
    with pytest.raises(OverloadedError, match=r"2 answers are waiting.*at most 2") as caught:
        engine.submit(request(5))
    assert caught.value.retry_after_s >= 1
    engine.step()
    handles.append(engine.submit(request(5)))
    drain(engine)
    assert all(len(tokens(handle)) == 8 for handle in handles)


def test_every_answer_of_a_waiting_request_counts() -> None:
    """Each of n answers holds a copy of its prompt while it waits, not only the first."""
    engine, _ = mock_engine(slots=1, max_waiting=6)
    handles = [engine.submit(request(5, n=4))]
    with pytest.raises(OverloadedError, match=r"4 answers are waiting.*at most 6"):
        engine.submit(request(5, n=3))
    handles.append(engine.submit(request(5, n=2)))
    with pytest.raises(OverloadedError, match="6 answers"):
        engine.submit(request(5))
    drain(engine)
    assert all(len(tokens(handle, choice)) == 8 for handle in handles for choice in (0, 1))


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


@pytest.mark.parametrize(
    ("prompt", "settings", "steps"),
    [(40, {}, 1), (40, {"whole_prompt": 30}, 2), (40, {"gap_ms": 4000.0}, 2), (80, {}, 3)],
)
def test_short_prompts_are_read_at_once(
    prompt: int, settings: dict[str, float], steps: int
) -> None:
    """Under many clients, their first tokens would wait for pieces of one another."""
    engine, _ = mock_engine(slots=3, gap_steps=4.0, prefill_chunk=64, **settings)
    running = engine.submit(request(4, max_tokens=80))
    for _ in range(5):
        engine.step()
    late = engine.submit(request(prompt, max_tokens=2))
    took = 0
    while not tokens(late):
        engine.step()
        took += 1
    assert took == steps if steps == 1 else took >= steps
    assert tokens(running)


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
