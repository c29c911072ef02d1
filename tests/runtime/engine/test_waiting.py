"""The queue on its own: who is next, who overtakes whom, who does not fit any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mock_engine import mock_engine

from ortolan.errors import OverloadedError
from ortolan.runtime.engine.life import Choice, RequestHandle
from ortolan.runtime.engine.waiting import WaitingQueue
from ortolan.runtime.params import Request, SamplingParams

New = Callable[..., Choice]


@pytest.fixture
def new() -> New:
    """Choices of requests that come one after the other."""
    engine, _ = mock_engine()

    def make(priority: int = 0, tokens: int = 5, n: int = 1) -> Choice:
        request = Request([5] * tokens, SamplingParams(n=n), priority=priority)
        handle: RequestHandle = engine.submit(request)
        return handle.choices[0]

    return make


def queue(patience: int = 2, **settings: int) -> WaitingQueue:
    return WaitingQueue(settings.get("requests", 100), settings.get("tokens", 1000), patience)


def order(waiting: WaitingQueue) -> list[Choice]:
    """All of them, as they are let in."""
    found = []
    while (choice := waiting.first()) is not None:
        waiting.admit(choice)
        found.append(choice)
    return found


def test_by_priority_then_by_arrival(new: New) -> None:
    choices = [new(priority) for priority in (1, 0, 1, -3, 0)]
    waiting = queue(patience=100)
    for choice in reversed(choices):  # not by when they were added
        waiting.add(choice)
    assert [choices.index(choice) for choice in order(waiting)] == [3, 1, 4, 0, 2]


def test_choices_of_a_request_stay_in_a_row(new: New) -> None:
    first, other = new(n=3), new()
    waiting = queue()
    for choice in (*first.handle.choices[::-1], other):
        waiting.add(choice)
    assert order(waiting) == [*first.handle.choices, other]


def test_only_later_arrivals_of_better_priority_overtake(new: New) -> None:
    """To wait behind whoever came earlier, or behind one's equals, is no injustice."""
    early_urgent, early, patient, late, late_urgent = (new(p) for p in (-1, 0, 5, 5, 0))
    waiting = queue(patience=100)
    for choice in (early_urgent, early, patient, late, late_urgent):
        waiting.add(choice)
    for choice in (early_urgent, early, late_urgent):
        assert waiting.first() is choice
        waiting.admit(choice)
    assert (patient.overtaken, late.overtaken) == (1, 1)
    waiting.admit(patient)
    assert late.overtaken == 1
    better = new(-5)
    waiting.add(better)
    waiting.add(worse := new(9))
    waiting.admit(worse)  # whose patience was over, say
    assert (better.overtaken, late.overtaken) == (0, 1)


def test_whoever_was_overtaken_often_enough_goes_first_and_by_arrival(new: New) -> None:
    worst, bad = new(9), new(5)
    urgent = [new(0) for _ in range(4)]
    waiting = queue(patience=2)
    for choice in (worst, bad, *urgent):
        waiting.add(choice)
    assert order(waiting) == [*urgent[:2], worst, bad, *urgent[2:]]


def test_a_preempted_choice_keeps_its_turn_and_its_patience(new: New) -> None:
    low = new(5)
    urgent = [new(0) for _ in range(3)]
    waiting = queue(patience=2)
    for choice in (low, *urgent):
        waiting.add(choice)
    for choice in urgent[:2]:
        waiting.admit(choice)
    waiting.admit(low)
    waiting.add(low)
    assert waiting.first() is low
    assert low.overtaken == 2


def test_tokens_are_counted_in_and_out(new: New) -> None:
    waiting = queue()
    first, second = new(tokens=7), new(tokens=11)
    waiting.add(first)
    waiting.add(second)
    assert waiting.tokens == 18
    waiting.remove(second)
    assert waiting.tokens == 7
    waiting.admit(first)
    assert (waiting.tokens, len(waiting)) == (0, 0)


@pytest.mark.parametrize(
    ("choices", "tokens", "fits"),
    [(1, 5, True), (2, 5, True), (3, 5, False), (1, 13, True), (1, 14, False)],
)
def test_caps_are_reached_and_not_passed(new: New, choices: int, tokens: int, fits: bool) -> None:
    waiting = queue(requests=3, tokens=20)
    waiting.check_room(0, 99, 999, 1.0)  # where nothing waits, any request may
    waiting.add(new(tokens=7))
    if fits:
        waiting.check_room(1, choices, tokens, 3.0)
    else:
        with pytest.raises(OverloadedError, match="try again in 3 s") as caught:
            waiting.check_room(1, choices, tokens, 3.0)
        assert caught.value.retry_after_s == 3.0
