"""Sampling parameters are checked once, on construction, and errors name the field."""

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from ortolan.errors import RequestError
from ortolan.runtime.params import Request, SamplingParams

REFUSED: list[tuple[str, Any]] = [
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", True),
    ("max_tokens", "7"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("logit_bias", [(1, 2.0)]),
    ("logit_bias", {"1": 2.0}),
    ("logit_bias", {True: 2.0}),
    ("logit_bias", {-1: 2.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: "much"}),
    ("stop", ""),
    ("stop", ["end", ""]),
    ("stop", ["end", 3]),
    ("stop", 3),
    ("stop", b"end"),
    ("stop", None),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 12),
    ("ignore_eos", 1),
    ("ignore_eos", "yes"),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("seed", True),
    ("n", 0),
    ("n", None),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:20])
def test_an_invalid_value_is_refused_by_name(name: str, value: Any) -> None:
    """A caller must learn which field is wrong, before any work starts."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "must be" in message


@pytest.mark.parametrize("size", [10**4, 10**6])
def test_an_error_does_not_echo_a_huge_value(size: int) -> None:
    """An error that repeats megabytes of the request is an attack on logs and clients."""
    for field in ({"temperature": "x" * size}, {"top_k": -(10**size)}, {"stop": [["y" * size]]}):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**field)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "accepted",
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"temperature": 0},
        {"temperature": 1e-8},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 1},
        {"repetition_penalty": 0.5},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 5: 100}},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"logprobs": 0},
        {"logprobs": 20, "n": 3},
    ],
    ids=str,
)
def test_a_boundary_value_is_accepted(accepted: dict[str, Any]) -> None:
    """The ends of the ranges are in everyday use (temperature 0, max_tokens 0, bias -100)."""
    params = SamplingParams(**accepted)
    for name, value in accepted.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize(
    "most",
    [{"stop_token_ids": range(1024)}, {"logit_bias": dict.fromkeys(range(4096), 1.0)}],
    ids=["stop_token_ids", "logit_bias"],
)
def test_lists_have_a_most(most: dict[str, Any]) -> None:
    """A million of them would hold every stream of a server for seconds."""
    SamplingParams(**most)
    ((name, values),) = most.items()
    more = range(10**6) if name == "stop_token_ids" else {**values, 5000: 1.0}
    with pytest.raises(RequestError, match=f"{name} holds more than {len(values)}"):
        SamplingParams(**{name: more})


def test_salt_has_a_most() -> None:
    """It is kept for as long as the cache holds a block of its prompts."""
    Request([1], SamplingParams(), salt="x" * 1024)
    with pytest.raises(RequestError, match="salt holds more than 1024"):
        Request([1], SamplingParams(), salt="x" * 1025)


def test_values_become_plain_and_immutable() -> None:
    """A caller that changes its list later must not change a request that is running."""
    stop, bias = ["a", "b"], {3: 1}
    params = SamplingParams(
        max_tokens=np.int64(4),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop=stop,
        stop_token_ids=np.array([7, 8]),  # type: ignore[arg-type]
        logit_bias=bias,
    )
    stop.append("c")
    bias[4] = 2
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (7, 8)
    assert params.logit_bias == {3: 1.0}
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    with pytest.raises(TypeError):
        params.logit_bias[4] = 2.0  # type: ignore[index]
    with pytest.raises(TypeError):
        params.logit_bias.update({4: 2.0})  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_one_stop_string_and_top_k_off_have_one_form() -> None:
    """Other code then reads a tuple and 0, whatever form the caller used."""
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(top_k=-1).top_k == 0


def test_params_survive_copying_and_writing_down() -> None:
    """Benchmarks print parameters as JSON; worker processes get them pickled."""
    params = SamplingParams(logit_bias={3: 1.5}, stop=["x"], seed=3)
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params) == params
    assert len({params, copy.copy(params)}) == 1
    assert json.loads(json.dumps(dataclasses.asdict(params)))["logit_bias"] == {"3": 1.5}


def test_greedy_means_temperature_zero() -> None:
    """0.0001 is cold, not greedy."""
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {10: 1.0}), ("stop_token_ids", [3, 10]), ("top_k", 11)],
)
def test_ids_beyond_the_vocabulary_are_refused_by_name(name: str, value: Any) -> None:
    """Such ids index past arrays, and have crashed other servers."""
    params = SamplingParams(**{name: value})
    params.check_against_model(11)
    with pytest.raises(RequestError, match=name):
        params.check_against_model(10)


@pytest.mark.parametrize("stop", [["x"] * 33, ["x" * 4097], ["x" * 2049] * 2])
def test_stop_strings_are_bounded(stop: list[str]) -> None:
    """Their automaton is built while all other requests wait."""
    with pytest.raises(RequestError, match="at most 32 of 4096 may be given"):
        SamplingParams(stop=stop)
    assert SamplingParams(stop=["x" * 128] * 32).stop
