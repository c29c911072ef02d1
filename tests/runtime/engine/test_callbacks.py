"""What readers may do while a step is under way: cancel, submit, raise. No other may tell."""

from __future__ import annotations

import pytest
from engine_requests import drain, request, tokens
from mock_engine import NAN, RAISES, mock_engine

from ortolan.errors import CancelledError, EngineError, TimedOutError
from ortolan.runtime.engine import residents
from ortolan.runtime.engine.life import RequestHandle, State
from ortolan.runtime.params import Request, TokenEvent


def alone(asked: Request) -> list[int]:
    engine, _ = mock_engine(slots=1)
    handle = engine.submit(asked)
    drain(engine)
    return tokens(handle)


@pytest.mark.parametrize("at", [1, 4, 8])
@pytest.mark.parametrize("victim", ["itself", "another"])
def test_a_reader_may_cancel_from_its_callback(at: int, victim: str) -> None:
    """A stream that is closed from within an event, the last one included, ends like any other."""
    engine, _ = mock_engine(slots=4, prefix_blocks=10)
    first, second, third = (engine.submit(request(20 + i, n=1 + i % 2)) for i in range(3))
    cancelled = first if victim == "itself" else second
    seen: list[TokenEvent] = []

    def sink(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) == at:
            engine.cancel(cancelled)

    first.sink = sink
    drain(engine)
    assert first.done
    assert second.done
    assert len(seen) == (at if victim == "itself" else 8)
    assert tokens(third) == alone(third.request)


def test_a_request_for_no_tokens_may_be_cancelled_from_its_first_event() -> None:
    engine, _ = mock_engine()
    handle = engine.submit(request(20, max_tokens=0, prompt_logprobs=0, n=3))
    handle.sink = lambda event: engine.cancel(handle)
    drain(engine)
    assert isinstance(handle.error, CancelledError)


def test_a_prompt_that_ended_within_a_step_is_not_read_on() -> None:
    """What was cut for this step may have been cancelled by an earlier call's events: its slot
    is somebody else's by then, or no slot at all."""
    engine, model = mock_engine(slots=4, ragged=False)
    running = engine.submit(request(30, max_tokens=30))
    while not running.events:
        engine.step()
    first, second = engine.submit(request([7] * 9)), engine.submit(request([8] * 9))
    first.sink = lambda event: engine.cancel(second)
    slots: list[int] = []
    prefill = model.prefill

    def watched(slot: int, *args: object) -> object:
        slots.append(slot)
        return prefill(slot, *args)  # type: ignore[arg-type]

    model.prefill = watched  # type: ignore[method-assign,assignment]
    drain(engine)
    assert -1 not in slots
    assert tokens(running) == alone(running.request)


def test_siblings_of_a_request_that_failed_in_the_same_step_are_not_read() -> None:
    """Choices that queue apart are read apart, and fail together: the second has no slot then."""
    engine, model = mock_engine(slots=2, ragged=False)
    handle = engine.submit(request(20, n=4, max_tokens=3))  # two have room, two queue
    while len(engine._scheduler.queue) != 2:
        engine.step()
    slots: list[int] = []
    prefill = model.prefill

    def broken(slot: int, *args: object) -> object:
        slots.append(slot)
        model.broken = True
        return prefill(slot, *args)  # type: ignore[arg-type]

    model.prefill = broken  # type: ignore[method-assign,assignment]
    drain(engine)
    assert slots == [0]
    assert {choice.state for choice in handle.choices} == {State.FINISHED, State.FAILED}


def test_a_reader_that_raises_ends_its_own_request_alone() -> None:
    """An exception must not cost the other rows of the step their token."""
    engine, _ = mock_engine(slots=4)
    good, bad, also_good = (engine.submit(request(20 + i, max_tokens=12)) for i in range(3))

    def sink(event: TokenEvent) -> None:
        raise ValueError("nobody reads this")

    bad.sink = sink
    drain(engine)
    assert isinstance(bad.error, EngineError)
    assert "ValueError" in str(bad.error)
    for handle in (good, also_good):
        assert tokens(handle) == alone(handle.request)


def test_a_new_request_may_be_submitted_when_one_ends() -> None:
    """Whoever keeps a number of requests running does it from `on_end`."""
    engine, _ = mock_engine(slots=2)
    later: list[RequestHandle] = []
    first = engine.submit(request(20, max_tokens=3))
    other = engine.submit(request(10, max_tokens=9))
    first.on_end = lambda: later.append(engine.submit(request(30)))
    drain(engine)
    assert tokens(later[0]) == alone(later[0].request)
    assert tokens(other) == alone(other.request)


def test_nan_after_the_last_prompt_token_keeps_nothing_when_no_answer_is_wanted() -> None:
    """Scores of a prompt do not look at its last logits; what is kept must be sound (rule 1b)."""
    engine, _ = mock_engine(prefix_blocks=10)
    bad = engine.submit(request([6] * 15 + [NAN], max_tokens=0, prompt_logprobs=0))
    drain(engine)
    assert isinstance(bad.error, EngineError)
    assert engine.stats().prefix_blocks == 0


def test_requests_that_have_ended_are_not_held_until_their_deadline() -> None:
    """A server with a timeout of an hour must not keep an hour of prompts."""
    engine, _ = mock_engine(slots=2)
    for _ in range(300):
        engine.submit(request(4, max_tokens=1, timeout_s=3600.0))
        drain(engine)
    assert len(engine._scheduler._deadlines) <= 64
    late = engine.submit(request(4, max_tokens=50, timeout_s=0.1))
    drain(engine)
    assert isinstance(late.error, TimedOutError)


def test_an_idle_engine_takes_more_choices_than_may_wait() -> None:
    """A refusal that says "try again" for what will be refused again would loop for ever."""
    engine, _ = mock_engine(slots=2, max_waiting=2)
    handle = engine.submit(request(9, n=5))
    drain(engine)
    assert handle.error is None


def test_more_answers_than_the_budget_holds_prompts_come_one_after_the_other() -> None:
    engine, _ = mock_engine(slots=4, kv_budget=60, prefix_blocks=4)
    handle = engine.submit(request(45, n=5))
    drain(engine)
    assert handle.error is None
    expected = alone(request(45))
    for index in range(5):
        found = [i for e in handle.events if e.choice == index for i in e.token_ids]
        assert found == expected


def test_a_chunk_is_no_larger_than_the_config_says() -> None:
    """Memory for a call's activations is planned by this number (a last token may join in)."""
    engine, model = mock_engine(prefill_chunk=4)
    engine.submit(request(30))
    drain(engine)
    assert model.largest_call <= 5


def test_low_priority_is_not_preempted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted answer makes its KV again step by step; preempted again each time before it is
    through, it would never end, however often it is let in."""
    # The mock's context is so short that the usual headroom would leave no room to outgrow.
    monkeypatch.setattr(residents, "_HEADROOM_TOKENS", 1)
    engine, _ = mock_engine(slots=4, kv_budget=180, priority_patience=4)
    low = engine.submit(request(4, max_tokens=85, priority=9))
    urgent: list[RequestHandle] = []
    for _ in range(4000):
        if sum(not handle.done for handle in urgent) < 6:
            urgent.append(engine.submit(request(4, max_tokens=85, priority=0)))
        engine.step()
        if low.done:
            break
    assert low.done
    assert engine.stats().preemptions
    assert sum(handle.done for handle in urgent) <= 20
    assert tokens(low) == alone(low.request)


def test_a_failed_choice_leaves_states_that_say_so() -> None:
    engine, _ = mock_engine(slots=4)
    bad = engine.submit(request([6] * 4, n=3, logit_bias={RAISES: 100.0}))
    drain(engine)
    assert {choice.state for choice in bad.choices} == {State.FAILED}


def test_an_interrupt_in_the_midst_of_a_step_spoils_no_later_answer() -> None:
    """Ctrl-C at a prompt of Python's, and on with the same model: a row whose token was lost must
    not go on as if nothing had been."""
    engine, _ = mock_engine(slots=2)
    sampler = engine._emitter._sampler
    sample, calls = sampler.sample, []

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return sample(*args)  # type: ignore[arg-type]

    sampler.sample = interrupted  # type: ignore[method-assign,assignment]
    first, second, waiting = (engine.submit(request(20 + i)) for i in range(3))
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert isinstance(first.error, EngineError)
    assert "KeyboardInterrupt" in str(second.error)
    later = engine.submit(request(30))
    drain(engine)
    for handle in (waiting, later):
        assert tokens(handle) == alone(handle.request)


@pytest.mark.parametrize("patience", [0, 4])
def test_a_prompt_that_is_being_read_is_overtaken_no_more_often_than_stated(patience: int) -> None:
    """With a slot but no turn, a request would starve as surely as in the queue."""
    engine, _ = mock_engine(slots=4, prefill_chunk=8, priority_patience=patience)
    low = engine.submit(request(90, max_tokens=1, priority=9))
    engine.step()
    assert low.choices[0].state is State.PREFILLING
    urgent: list[RequestHandle] = []
    for _ in range(400):
        while sum(not handle.done for handle in urgent) < 5:
            urgent.append(engine.submit(request(9, max_tokens=1)))
        engine.step()
        if low.done:
            break
    assert low.done
    assert sum(handle.done for handle in urgent) <= patience + 3  # the slots beside it


@pytest.mark.parametrize("call", ["step", "logits"])
def test_a_reader_may_not_run_the_model(call: str) -> None:
    """It would overwrite the logits that other rows of the step are about to be drawn from."""
    engine, _ = mock_engine(slots=3)
    good, bad = engine.submit(request(20)), engine.submit(request(21))
    arguments = ([5], None) if call == "logits" else ()
    bad.sink = lambda event: getattr(engine, call)(*arguments)
    drain(engine)
    assert "a step is under way" in str(bad.error)
    assert tokens(good) == alone(good.request)
