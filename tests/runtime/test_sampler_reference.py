"""What is drawn, against a plain numpy implementation over the whole vocabulary."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortolan.graphs.sample import build_sample_graph
from ortolan.runtime.engine import sampler as sampler_module
from ortolan.runtime.engine.sampler import Sampled, Sampler
from ortolan.runtime.engine.sampler_row import SamplerRow
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.params import SamplingParams

VOCAB, NUM_VALID = 1003, 997


def make_session(vocab_size: int) -> ort.InferenceSession:
    use_threads(None)
    model = ir.to_proto(build_sample_graph(vocab_size)).SerializeToString()
    return ort.InferenceSession(model, session_options({}), providers=["CPUExecutionProvider"])


SESSION = make_session(VOCAB)


@pytest.fixture(scope="module", params=["host", "graph"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """Both ways to find candidates: numpy, and the graph that logits on a device take."""
    sampler = Sampler(SESSION, NUM_VALID)
    if request.param == "graph":
        sampler._candidates = sampler._graph.run  # type: ignore[method-assign]
    return sampler


def row_of(params: SamplingParams, prompt: Sequence[int] = (), answer: Sequence[int] = ()) -> Any:
    row = SamplerRow(params, prompt, NUM_VALID)
    for token_id in answer:
        row.append(token_id)
    return row


def at_uniform(row: SamplerRow, uniform: float) -> SamplerRow:
    """The row, with its next random number put in by hand."""
    row.uniform = lambda: uniform  # type: ignore[method-assign]
    return row


def draw(sampler: Sampler, logits: np.ndarray, row: SamplerRow) -> Sampled:
    (result,) = sampler.sample(logits.reshape(1, -1), [row])
    assert isinstance(result, Sampled)
    return result


def random_logits(seed: int, batch: int = 1, spread: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((batch, VOCAB)) * spread).astype(np.float32)


# The reference: every step written out over the whole vocabulary.


def reference_logits(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> np.ndarray:
    """Adjusted logits [vocab], float64, -inf where never sampled."""
    out = logits.astype(np.float64)
    for token_id in set(prompt) | set(answer):
        scale = params.repetition_penalty
        out[token_id] = out[token_id] / scale if out[token_id] > 0 else out[token_id] * scale
    for token_id in set(answer):
        out[token_id] -= params.presence_penalty
        out[token_id] -= params.frequency_penalty * list(answer).count(token_id)
    for token_id, bias in params.logit_bias.items():
        out[token_id] += bias
    out[NUM_VALID:] = -np.inf
    return out


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What is left of adjusted `logits` [vocab] after temperature, top_k, top_p, min_p."""
    logits = logits / params.temperature
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        logits[order[params.top_k :]] = -np.inf
    probabilities = softmax(logits)
    mass = 0.0
    for token_id in order:
        if mass >= params.top_p and params.top_p < 1.0:
            logits[token_id] = -np.inf
        mass += probabilities[token_id]
    probabilities = softmax(logits)
    logits[probabilities < params.min_p * probabilities.max()] = -np.inf
    return softmax(logits)


def reference_token(logits: np.ndarray, params: SamplingParams, uniform: float) -> set[int]:
    """The token for `uniform`; two where it falls within rounding of a border."""
    probabilities = reference_distribution(logits.copy(), params)
    order = np.argsort(-logits, kind="stable")
    cumulative = np.cumsum(probabilities[order])
    found = set()
    for nudge in (-1e-5, 0.0, 1e-5):
        target = min(max(uniform + nudge, 0.0), float(np.nextafter(cumulative[-1], 0)))
        found.add(int(order[np.searchsorted(cumulative, target, side="right")]))
    return found


def filters_are_near_a_border(logits: np.ndarray, params: SamplingParams) -> bool:
    """Whether a change of top_p or min_p within rounding would change the support."""
    sizes = set()
    for factor in (1 - 1e-5, 1.0, 1 + 1e-5):
        nudged = dataclasses.replace(
            params,
            top_p=min(params.top_p * factor, 1.0) if params.top_p < 1.0 else 1.0,
            min_p=min(params.min_p * factor, 1.0),
        )
        sizes.add(int((reference_distribution(logits.copy(), nudged) > 0).sum()))
    return len(sizes) > 1


params_strategy = st.builds(
    SamplingParams,
    temperature=st.one_of(st.floats(0.05, 5.0), st.just(1.0)),
    top_k=st.one_of(st.just(0), st.integers(1, 200), st.just(NUM_VALID)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.9999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
)
tokens_strategy = st.lists(st.integers(0, NUM_VALID - 1), max_size=40)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    params=params_strategy,
    prompt=tokens_strategy,
    answer=tokens_strategy,
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.3, 1.0, 3.0, 8.0]),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_same_random_number_same_token_as_the_reference(
    params: SamplingParams,
    prompt: list[int],
    answer: list[int],
    seed: int,
    spread: float,
    uniform: float,
) -> None:
    """Fetching candidates step by step must not show in what is drawn."""
    logits = random_logits(seed, spread=spread)[0]
    adjusted = reference_logits(logits, params, prompt, answer)
    row = at_uniform(row_of(params, prompt, answer), uniform)
    found = draw(Sampler(SESSION, NUM_VALID), logits, row).token_id
    assert reference_distribution(adjusted.copy(), params)[found] > 0 or (
        filters_are_near_a_border(adjusted, params)
    )
    if not filters_are_near_a_border(adjusted, params):
        assert found in reference_token(adjusted, params, uniform)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    params=params_strategy,
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_the_number_of_candidates_does_not_show(
    params: SamplingParams, seed: int, spread: float, uniform: float
) -> None:
    """How many candidates a step fetches depends on the other rows: it must change nothing."""
    logits = random_logits(seed, spread=spread)
    found = set()
    with pytest.MonkeyPatch.context() as patch:
        for first in (2, 8, 64, 300, VOCAB):
            patch.setattr(sampler_module, "_FIRST_CANDIDATES", first)
            sampler = Sampler(SESSION, NUM_VALID)
            found.add(draw(sampler, logits, at_uniform(row_of(params), uniform)).token_id)
    assert len(found) == 1


# Probabilities of the first five tokens; all others together have none.
LADDER = np.full(VOCAB, -np.inf, np.float32)
LADDER[[10, 20, 30, 40, 50]] = np.log([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.mark.parametrize(
    ("settings_", "support"),
    [
        ({}, {10, 20, 30, 40, 50}),
        ({"top_k": 2}, {10, 20}),
        ({"top_k": 500}, {10, 20, 30, 40, 50}),
        ({"top_p": 0.5}, {10, 20}),
        ({"top_p": 0.69}, {10, 20}),
        ({"top_p": 0.71}, {10, 20, 30}),
        ({"top_p": 1e-9}, {10}),
        ({"min_p": 0.3}, {10, 20, 30}),
        ({"min_p": 1.0}, {10}),
        # Of the two left by top_k, the first has 4/7 of the mass: top_p counts that.
        ({"top_k": 2, "top_p": 0.5}, {10}),
        # min_p compares after temperature: 0.5 ** 2 of the ratios.
        ({"min_p": 0.3, "temperature": 0.5}, {10, 20}),
        ({"top_p": 0.71, "min_p": 0.5}, {10, 20}),
        ({"temperature": 1e-4}, {10}),
        ({"temperature": 1e-8}, {10}),
        ({"temperature": 1e-300}, {10}),
        ({"temperature": 1e300}, {10, 20, 30, 40, 50}),
    ],
    ids=str,
)
def test_a_filter_keeps_exactly_its_tokens(
    sampler: Sampler, settings_: dict[str, Any], support: set[int]
) -> None:
    """Worked out by hand from the ladder's probabilities."""
    params = SamplingParams(**settings_)
    found = {
        draw(sampler, LADDER, at_uniform(row_of(params), uniform)).token_id
        for uniform in [*np.linspace(0, 1, 200, endpoint=False), 1 - 2**-53]
    }
    assert found == support


def test_draws_follow_the_distribution(sampler: Sampler) -> None:
    """Chi-square over 4,000 positions of one seed, at the 0.1 % level for 4 degrees."""
    row = row_of(SamplingParams(seed=11))
    counts = dict.fromkeys([10, 20, 30, 40, 50], 0)
    for _ in range(4000):
        token_id = draw(sampler, LADDER, row).token_id
        counts[token_id] += 1
        row.append(token_id)
    expected = np.exp(LADDER[list(counts)].astype(np.float64)) * 4000
    chi_square = float((((np.array(list(counts.values())) - expected) ** 2) / expected).sum())
    assert chi_square < 18.47


def test_minus_infinity_is_never_drawn(sampler: Sampler) -> None:
    """Also where a draw falls on the very end of the distribution."""
    for params in (SamplingParams(), SamplingParams(top_k=50), SamplingParams(min_p=1e-9)):
        for uniform in (0.0, 0.5, 1 - 2**-53):
            token_id = draw(sampler, LADDER, at_uniform(row_of(params), uniform)).token_id
            assert math.isfinite(LADDER[token_id])


@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_the_same_with_and_without_the_graph(sampler: Sampler, seed: int) -> None:
    """Asking for logprobs takes the graph's path; it must not change the answer's tokens."""
    rng = np.random.default_rng(seed)
    logits = np.round(random_logits(seed)[0], 1)
    params = SamplingParams(
        temperature=0, repetition_penalty=1.7, frequency_penalty=0.3, logit_bias={5: 2.0}
    )
    history = rng.integers(0, NUM_VALID, 300).tolist(), np.argsort(-logits)[:40].tolist()
    plain = draw(sampler, logits, row_of(params, *history))
    scored = draw(sampler, logits, row_of(dataclasses.replace(params, logprobs=2), *history))
    expected = reference_logits(logits, params, *history)
    assert plain.token_id == scored.token_id
    assert expected[plain.token_id] == pytest.approx(expected.max(), abs=1e-5)
