"""What is counted: cached tokens of every choice, and calls that fail."""

from __future__ import annotations

import pytest
from engine_requests import drain, request
from mock_engine import CONTEXT, RAISES, mock_engine

from ortolan.errors import EngineError
from ortolan.runtime.engine.life import RequestHandle
from ortolan.runtime.params import Request, SamplingParams


def cached(handle: RequestHandle) -> dict[int, int]:
    """Choice -> cached tokens of its usage."""
    return {e.choice: e.usage.cached_tokens for e in handle.events if e.usage is not None}


@pytest.mark.parametrize("slots", [2, 5])
def test_every_choice_tells_what_was_cached_of_its_prompt(slots: int) -> None:
    """A bill that depends on which of n answers it is would be wrong for all but one."""
    engine, _ = mock_engine(slots=slots, prefix_blocks=20)
    first = engine.submit(request(40))
    drain(engine)
    several = engine.submit(request(40, n=5))
    drain(engine)
    assert cached(first) == {0: 0}
    assert cached(several) == dict.fromkeys(range(5), 32)


def test_being_preempted_makes_no_token_cheaper() -> None:
    """What is found again after a preemption was paid for at the first time."""
    engine, _ = mock_engine(slots=2, kv_budget=CONTEXT, prefix_blocks=20)
    handles = [engine.submit(request([kind] * 20, max_tokens=60)) for kind in (5, 6)]
    drain(engine)
    assert engine.stats().preemptions
    assert engine.stats().prefix_hit_tokens  # it was found again
    assert [cached(handle) for handle in handles] == [{0: 0}, {0: 0}]


def test_requests_that_fail_now_and_then_do_not_break_the_engine() -> None:
    """Only calls that fail in a row, with none between that works, are the session's fault."""
    engine, _ = mock_engine()
    for _ in range(5):
        good = engine.submit(request(9))
        bad = engine.submit(request([6, RAISES, 6]))
        drain(engine)
        assert isinstance(bad.error, EngineError)
        assert good.error is None
    assert engine.stats().broken is None


def test_nobody_is_admitted_to_be_preempted_at_once() -> None:
    """Up to the brim, a newcomer's prefill would be thrown away a few tokens later."""
    engine, _ = mock_engine(slots=2, kv_budget=CONTEXT)
    handles = [engine.submit(request(45, max_tokens=8)) for _ in range(2)]
    drain(engine)
    assert all(handle.error is None for handle in handles)
    assert engine.stats().preemptions == 0
    assert engine.stats().prompt_tokens == 90


def test_a_prompt_of_one_token_is_read_alone() -> None:
    """Alone it is a call of one row; in company it would be computed by other code (rule 1a)."""
    engine, model = mock_engine()
    for token_id in (5, 6, 7):
        engine.submit(request([token_id]))
    drain(engine)
    assert model.prefill_rows == [1, 1, 1]


def test_scores_of_the_prompt_come_once() -> None:
    """With the first event of each answer; a thousand tokens' scores with each would be a flood."""
    engine, _ = mock_engine()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, n=2, prompt_logprobs=0)
    handle = engine.submit(Request([5, 6, 7], params))
    drain(engine)
    for choice in range(2):
        counts = [len(e.prompt_logprobs) for e in handle.events if e.choice == choice]
        assert counts == [3, 0, 0, 0]
