"""Whatever fails on a mock model ends the requests concerned, and no other."""

from __future__ import annotations

import pytest
from engine_requests import assert_empty, drain, request, states, tokens
from mock_engine import NAN, RAISES, mock_engine

from ortolan.errors import (
    EngineError,
)
from ortolan.runtime.engine.life import State
from ortolan.runtime.params import Request, SamplingParams


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


@pytest.mark.parametrize("row_multiple", [1, 2])
def test_a_prefill_that_raises_ends_its_request_alone(row_multiple: int) -> None:
    engine, _ = mock_engine(row_multiple=row_multiple)
    handles = [engine.submit(request(ids)) for ids in ([5] * 9, [6, 6, RAISES], [7] * 9, [8] * 9)]
    drain(engine)
    assert [handle.error is None for handle in handles] == [True, False, True, True]
    assert engine.stats().broken is None
    assert_empty(engine)


@pytest.mark.parametrize("row_multiple", [1, 2])
def test_a_decode_that_raises_ends_its_request_alone(row_multiple: int) -> None:
    engine, _ = mock_engine(row_multiple=row_multiple)
    good = engine.submit(request(9, max_tokens=20))
    bad = engine.submit(
        Request([6] * 4, SamplingParams(temperature=0, max_tokens=9, logit_bias={RAISES: 100.0}))
    )
    also_good = engine.submit(request([7] * 9, max_tokens=20))
    drain(engine)
    assert bad.error is not None
    assert tokens(bad) == [RAISES]
    for handle in (good, also_good):
        alone, _ = mock_engine(slots=1, row_multiple=row_multiple)
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
