"""Loads: the same for every server, other prompts in every round, traces read strictly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortolan.bench.serving.load import LoadRequest, ServePlan, heldout_words, read_trace
from ortolan.errors import UsageError


def test_mix_is_made_of_words_within_its_ranges() -> None:
    """A load that is not the one asked for cannot be compared with another's."""
    plan = ServePlan(requests=200, prompt_words=(3, 6), output_tokens=(2, 4))
    found = plan.round(0)
    texts = [str(request.prompt).split() for request in found]
    assert {len(words) for words in texts} == {3, 4, 5, 6}
    assert {request.max_tokens for request in found} == {2, 3, 4}
    assert {word for words in texts for word in words} <= set(heldout_words())


def test_same_seed_makes_the_same_load_everywhere() -> None:
    """Each server gets it anew; another Python version must not make another one."""
    plan = ServePlan(requests=1, prompt_words=(4, 4), seed=7)
    assert plan.round(2) == ServePlan(requests=1, prompt_words=(4, 4), seed=7).round(2)
    assert plan.round(2) == [LoadRequest("out left the their", 49)]


def test_no_prompt_begins_as_an_earlier_one() -> None:
    """Servers keep what they read of a prompt: a second look would measure that."""
    plan = ServePlan(requests=96)
    prompts = [request.prompt for turn in range(5) for request in plan.round(turn)]
    prompts += [request.prompt for request in plan.warm_up_round()]
    assert len({str(prompt)[:40] for prompt in prompts}) == len(prompts)


def test_poisson_arrivals_have_the_rate_that_was_asked_for() -> None:
    """The mean of exponential gaps, over many."""
    due_s = ServePlan(requests=4000, rate=50.0).arrivals_s(0)
    assert due_s == sorted(due_s)
    assert due_s[0] == 0
    assert 4000 / due_s[-1] == pytest.approx(50, rel=0.1)


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(f"{json.dumps(value)}\n\n" for value in values), encoding="utf-8")
    return path


def test_trace_is_read_in_order_of_arrival_from_zero(tmp_path: Path) -> None:
    """Recorded clocks begin anywhere, and answers are logged in the order of their ends."""
    path = write(
        tmp_path / "trace.jsonl",
        {"arrival_s": 7.5, "prompt": [1, 2], "max_tokens": 2},
        {"arrival_s": 7, "prompt": "a", "max_tokens": 1, "user": "x"},
    )
    plan = ServePlan(trace=read_trace(path))
    assert plan.arrivals_s(0) == [0, 0.5]
    assert plan.round(0) == plan.round(1) == [LoadRequest("a", 1), LoadRequest((1, 2), 2)]
    assert (plan.arrivals, plan.closed_loop) == ("as recorded", False)
    assert ServePlan(trace=plan.trace, clients=2).closed_loop


GOOD = {"arrival_s": 0, "prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1], "line 2 is no JSON object"),
        ({**GOOD, "arrival_s": -1}, "line 2: arrival_s"),
        ({**GOOD, "arrival_s": float("nan")}, "line 2: arrival_s"),
        ({**GOOD, "prompt": None}, "line 2: prompt"),
        ({**GOOD, "prompt": [1, "x"]}, "line 2: prompt"),
        ({**GOOD, "max_tokens": 0}, "line 2: max_tokens"),
        ({**GOOD, "max_tokens": True}, "line 2: max_tokens"),
    ],
)
def test_wrong_line_of_a_trace_is_named(tmp_path: Path, line: object, message: str) -> None:
    """Found before anything is measured."""
    path = tmp_path / "t.jsonl"
    path.write_text(f"\n{json.dumps(line)}\n")
    with pytest.raises(UsageError, match=message):
        read_trace(path)


def test_trace_without_requests_is_refused(tmp_path: Path) -> None:
    """An empty file would measure nothing, in no time."""
    with pytest.raises(UsageError, match="holds no request"):
        read_trace(write(tmp_path / "t.jsonl"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "absent")
