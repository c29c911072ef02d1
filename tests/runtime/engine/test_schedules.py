"""Thousands of schedules on a mock model: no answer tells what else was running."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from mock_engine import CONTEXT, END, VOCAB, mock_engine

from ortolan.errors import CancelledError
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.life import RequestHandle
from ortolan.runtime.params import Request, SamplingParams, TokenEvent

# Prompts begin alike often, so that the prefix cache has something to find.
STEMS = [tuple(4 + (7 * i + stem) % 40 for i in range(70)) for stem in range(2)]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    stem = draw(st.sampled_from(STEMS))
    shared = draw(st.integers(0, 70))
    own = draw(st.lists(st.integers(4, VOCAB - 1), min_size=0 if shared else 1, max_size=20))
    params = SamplingParams(
        max_tokens=draw(st.integers(0, 30)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0])),
        logit_bias={draw(st.integers(4, VOCAB - 1)): draw(st.sampled_from([-5.0, 2.0]))},
        seed=draw(st.integers(0, 9)),
        n=draw(st.sampled_from([1, 1, 1, 3])),
        logprobs=0,
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        ignore_eos=draw(st.booleans()),
    )
    return Request(
        (*stem[:shared], *own),
        params,
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from(["", "other"])),
    )


@dataclass(frozen=True)
class Cancel:
    """Of the request that came as number `which`."""

    which: int


operations = st.lists(
    st.one_of(requests(), st.just("step"), st.just("step"), st.builds(Cancel, st.integers(0, 20))),
    max_size=40,
)
engines = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 5),
        "kv_budget": st.integers(CONTEXT, 3 * CONTEXT),
        "prefix_blocks": st.sampled_from([0, 3, 40]),
        "row_multiple": st.sampled_from([1, 2]),
        "ragged": st.booleans(),
        "prefill_chunk": st.sampled_from([2, 5, 32, 64]),
    }
)


def answers(events: list[TokenEvent]) -> dict[int, list[object]]:
    """Choice -> everything that was said of it, but for what the cache saved."""
    found: dict[int, list[object]] = {}
    for event in events:
        said = (event.token_ids, event.logprobs, event.prompt_logprobs, event.finish_reason)
        found.setdefault(event.choice, []).append(said)
    return found


@functools.cache
def alone(request: Request) -> dict[int, list[object]]:
    """The request's answers on an idle engine that remembers nothing."""
    engine, _ = mock_engine(slots=1, kv_budget=CONTEXT)
    handle = engine.submit(request)
    while engine.step():
        pass
    return answers(list(handle.events))


def run(engine: Engine, schedule: list[object]) -> list[RequestHandle]:
    handles: list[RequestHandle] = []
    for operation in schedule:
        if isinstance(operation, Request):
            handles.append(engine.submit(operation))
        elif isinstance(operation, Cancel):
            if operation.which < len(handles):
                engine.cancel(handles[operation.which])
        else:
            engine.step()
    for _ in range(5000):
        if not engine.step():
            return handles
    raise AssertionError("the engine does not come to an end")


@settings(max_examples=300, deadline=None)
@given(engines, operations)
def test_answers_do_not_tell_what_else_was_running(
    setup: dict[str, int], schedule: list[object]
) -> None:
    """vllm#23138: batching, chunking, preemption, moves and prefixes must not change a token."""
    engine, _ = mock_engine(**setup)  # type: ignore[arg-type]
    for handle in run(engine, schedule):
        assert handle.done
        found, expected = answers(list(handle.events)), alone(handle.request)
        if isinstance(handle.error, CancelledError):
            for choice, said in found.items():
                assert said == expected[choice][: len(said)]
        else:
            assert handle.error is None
            assert found == expected
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)


@settings(max_examples=150, deadline=None)
@given(engines, st.lists(requests(), min_size=2, max_size=8), st.data())
def test_readers_that_cancel_within_a_step_change_no_other_answer(
    setup: dict[str, int], wanted: list[Request], data: st.DataObject
) -> None:
    """What was cut and fed for a step may have ended before its turn within the same step."""
    engine, _ = mock_engine(**setup)  # type: ignore[arg-type]
    handles = [engine.submit(request) for request in wanted]
    seen: list[list[TokenEvent]] = [[] for _ in handles]
    for index, handle in enumerate(handles):
        at = data.draw(st.integers(1, 6))
        victim = handles[data.draw(st.integers(0, len(handles) - 1))]
        events = seen[index] = list(handle.events)  # a request for no tokens has ended already

        def sink(
            event: TokenEvent,
            events: list[TokenEvent] = events,
            at: int = at,
            victim: RequestHandle = victim,
        ) -> None:
            events.append(event)
            if len(events) == at:
                engine.cancel(victim)

        handle.sink = sink
    run(engine, [])
    for handle, events in zip(handles, seen, strict=True):
        assert handle.done
        expected = alone(handle.request)
        if handle.error is None:
            assert answers(events) == expected
        else:
            assert isinstance(handle.error, CancelledError)
            for choice, said in answers(events).items():
                assert said == expected[choice][: len(said)]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)


def test_the_mock_tells_when_a_rule_is_broken() -> None:
    """A property that cannot fail proves nothing: KV that decode wrote gives another answer."""
    _, model = mock_engine()
    ids = [5, 6, 7, 8]
    prefilled = model.prefill(0, [ids], [0], [[3]])[0, 0]
    model.prefill(1, [ids[:3]], [0], [[2]])
    decoded = model.decode(1, [ids[3]], [3])[0]
    assert (prefilled != decoded).any()
    assert END < VOCAB
