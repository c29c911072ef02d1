"""The sampler over batches: greedy, adjusted, scored and broken rows side by side."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ortolan.errors import EngineError
from ortolan.graphs.sample import build_sample_graph
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_logits import DeviceLogits
from ortolan.runtime.engine.sampler import Sampled, Sampler
from ortolan.runtime.engine.sampler_choice import Candidates
from ortolan.runtime.engine.sampler_row import SamplerRow
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.params import SamplingParams
from ortolan.runtime.providers import find_provider

VOCAB, NUM_VALID = 1003, 997
GREEDY = SamplingParams(temperature=0)


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

        def by_graph(logits: Any, rows: Sequence[SamplerRow], k: int) -> Candidates:
            values = [logits] if isinstance(logits, np.ndarray) else logits.picked()
            return sampler._graph.run_all(values, rows, k)

        sampler._candidates = by_graph  # type: ignore[method-assign]
    return sampler


def row_of(params: SamplingParams, prompt: Sequence[int] = (), answer: Sequence[int] = ()) -> Any:
    row = SamplerRow(params, prompt, NUM_VALID)
    for token_id in answer:
        row.append(token_id)
    return row


def draw(sampler: Sampler, logits: np.ndarray, row: SamplerRow) -> Sampled:
    (result,) = sampler.sample(logits.reshape(1, -1), [row])
    assert isinstance(result, Sampled)
    return result


def random_logits(seed: int, batch: int = 1, spread: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((batch, VOCAB)) * spread).astype(np.float32)


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties(sampler: Sampler) -> None:
    """Temperature 0 must mean one answer."""
    logits = random_logits(3)[0]
    logits[[700, 7, 70]] = 40.0
    assert draw(sampler, logits, row_of(GREEDY)).token_id == 7
    with_logprobs = dataclasses.replace(GREEDY, logprobs=0)  # by way of the graph
    assert draw(sampler, logits, row_of(with_logprobs)).token_id == 7


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=2.0, seed=1)])
def test_ids_past_the_tokenizer_are_never_sampled(sampler: Sampler, params: SamplingParams) -> None:
    """The detokenizer has no text for a padding id."""
    logits = random_logits(4)[0]
    logits[NUM_VALID:] = 90.0
    params = dataclasses.replace(params, logit_bias={VOCAB - 1: 100.0})
    row = row_of(params, prompt=[VOCAB - 1])
    for _ in range(50):
        token_id = draw(sampler, logits, row).token_id
        assert token_id < NUM_VALID
        row.append(token_id)


def test_bias_decides(sampler: Sampler) -> None:
    """+100 forces a token and -100 bans it: what callers use logit_bias for."""
    logits = random_logits(5)[0]
    best = int(logits[:NUM_VALID].argmax())
    forced = SamplingParams(logit_bias={123: 100.0}, seed=1)
    assert draw(sampler, logits, row_of(forced)).token_id == 123
    banned = dataclasses.replace(GREEDY, logit_bias={best: -100.0})
    assert draw(sampler, logits, row_of(banned)).token_id != best


def test_a_long_history_is_penalized_wholly(sampler: Sampler) -> None:
    """Every id seen is adjusted, past any first capacity; here all but one are."""
    params = dataclasses.replace(GREEDY, repetition_penalty=5.0, logprobs=0)
    logits = np.linspace(10, 5, VOCAB).astype(np.float32)
    everything_but = [token_id for token_id in range(NUM_VALID) if token_id != 640]
    row = row_of(params, prompt=everything_but[:400], answer=everything_but[400:])
    assert row.num_adjusted == NUM_VALID - 1
    assert draw(sampler, logits, row).token_id == 640


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("broken", [GREEDY, SamplingParams(seed=1, repetition_penalty=1.1)])
def test_a_broken_row_fails_alone(sampler: Sampler, bad: float, broken: SamplingParams) -> None:
    """One request's NaN must end that request and no other."""
    logits = random_logits(6, batch=3)
    everyone = [row_of(SamplingParams(seed=4)), row_of(broken, [1], [2]), row_of(GREEDY)]
    clean = sampler.sample(logits, everyone)
    logits[1, 500 if bad != -np.inf else slice(None)] = bad
    found = sampler.sample(logits, everyone)
    assert isinstance(found[1], EngineError)
    assert [found[0], found[2]] == [clean[0], clean[2]]


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-20, 1e20, 1e308])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0])
@pytest.mark.filterwarnings("error")
def test_any_repetition_penalty_leaves_a_token_to_draw(
    sampler: Sampler, penalty: float, temperature: float
) -> None:
    """A number that a request may send must not end as a fault of the model's."""
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature, seed=1)
    draw(sampler, random_logits(6, batch=1)[0], row_of(params, prompt=[1, 2, 3], answer=[4]))


LOGPROB_PARAMS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=1, temperature=0.3, top_k=5),
    SamplingParams(seed=1, temperature=3.0),
    dataclasses.replace(GREEDY, repetition_penalty=1.9),
    SamplingParams(seed=1, logit_bias={3: 100.0}),
]


@pytest.mark.parametrize("params", LOGPROB_PARAMS, ids=range(len(LOGPROB_PARAMS)))
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_the_models_own(sampler: Sampler, params: SamplingParams, count: int) -> None:
    """Before penalties, bias and temperature: scores that do not depend on the settings."""
    logits = random_logits(8)[0]
    likely = np.argsort(-logits)[:9].tolist()
    row = row_of(dataclasses.replace(params, logprobs=count), prompt=likely)
    plain = draw(sampler, logits, row_of(params, prompt=likely))
    assert plain.logprob is None
    assert plain.top_logprobs == ()
    found = draw(sampler, logits, row)
    own = logits[:NUM_VALID].astype(np.float64)
    expected = own - own.max() - np.log(np.exp(own - own.max()).sum())
    assert found.token_id == plain.token_id
    assert found.logprob == pytest.approx(expected[found.token_id], abs=1e-5)
    top = np.argsort(-own, kind="stable")[:count]
    assert [token_id for token_id, _ in found.top_logprobs] == top.tolist()
    np.testing.assert_allclose([p for _, p in found.top_logprobs], expected[top], atol=1e-5)


BATCH_PARAMS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=3.0, logprobs=3),
    SamplingParams(seed=3, top_k=100, repetition_penalty=1.3),
    dataclasses.replace(GREEDY, logprobs=4, repetition_penalty=1.3),
    SamplingParams(seed=5, top_p=0.99, temperature=4.0),
    SamplingParams(seed=6, min_p=0.001, presence_penalty=1.0, logprobs=0),
    SamplingParams(seed=7, temperature=1e-8),
]


def on_device(logits: np.ndarray) -> DeviceLogits:
    """Logits [batch, vocab] as those of decode on a device, which here is the CPU's."""
    value = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(logits[:, None]))
    device = Device(find_provider("cpu", ort))
    return DeviceLogits(device, [value], np.arange(len(logits)))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_row_is_drawn_the_same_in_every_batch(sampler: Sampler, elsewhere: bool) -> None:
    """Rule 1, same request, same bits: tokens and logprobs exactly equal, alone or among 16."""
    logits = random_logits(9, batch=16, spread=1.5)
    rows = [row_of(BATCH_PARAMS[i % 8], [i, i + 1], range(3 * i)) for i in range(16)]
    held: Any = on_device(logits) if elsewhere else logits
    alone = [sampler.sample(held[i : i + 1], [rows[i]])[0] for i in range(16)]
    for batch in range(1, 17):
        for first in {0, (16 - batch) // 2, 16 - batch}:
            part = held[first : first + batch]
            assert sampler.sample(part, rows[first : first + batch]) == alone[first : first + batch]


def test_a_device_value_gives_the_same(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that stay on a device take another path through the code, to the same tokens."""
    logits = random_logits(9, batch=16, spread=1.5)
    rows = [row_of(BATCH_PARAMS[i % 8], [i, i + 1], range(3 * i)) for i in range(13)]
    expected = Sampler(SESSION, NUM_VALID).sample(logits, rows)
    monkeypatch.setattr(sampler._graph, "_binds_by_reference", False)
    for found, host in zip(sampler.sample(on_device(logits), rows), expected, strict=True):
        assert isinstance(found, Sampled)
        assert isinstance(host, Sampled)
        assert found.token_id == host.token_id
        assert [i for i, _ in found.top_logprobs] == [i for i, _ in host.top_logprobs]
        # The two add up in another order.
        assert (found.logprob is None) == (host.logprob is None)
        assert found.logprob is None or found.logprob == pytest.approx(host.logprob, abs=1e-6)


def test_the_batch_may_hold_more_rows_than_are_live(sampler: Sampler) -> None:
    """Decode may run padded; the padding's logits are anything, NaN included."""
    logits = random_logits(10, batch=4)
    logits[2:] = np.nan
    rows = [row_of(SamplingParams(seed=1)), row_of(SamplingParams(seed=2, logprobs=2))]
    assert sampler.sample(logits, rows) == sampler.sample(logits[:2].copy(), rows)
    assert sampler.sample(logits, []) == []


def test_logits_written_into_the_same_buffer_are_seen(sampler: Sampler) -> None:
    """The decode session writes every step's logits into one bound array."""
    buffer = random_logits(11, batch=2)
    rows = [row_of(SamplingParams(seed=1)), row_of(SamplingParams(seed=2, top_k=3))]
    for step in range(5):
        buffer[:] = random_logits(20 + step, batch=2)
        seen = sampler.sample(buffer, rows)
        assert seen == sampler.sample(buffer.copy(), rows)
        assert seen == Sampler(SESSION, NUM_VALID).sample(buffer.copy(), rows)


def test_adjustments_of_an_earlier_step_are_gone(sampler: Sampler) -> None:
    """Rows change places between steps: buffers are reused, their old contents must not be."""
    logits = random_logits(13, batch=2)
    logits[1] = logits[0]
    banning = {int(token_id): -100.0 for token_id in np.argsort(-logits[0])[:5]}
    plain = row_of(SamplingParams(seed=1, top_k=2))
    banned = row_of(SamplingParams(seed=1, top_k=2, logit_bias=banning))
    first = sampler.sample(logits, [banned, plain])
    assert first[0] != first[1]
    assert sampler.sample(logits, [plain, banned]) == first[::-1]


def test_sampling_changes_neither_logits_nor_rows(sampler: Sampler) -> None:
    """The engine may draw again (a retry, a longer look): only `append` moves a row on."""
    logits = random_logits(12, batch=2)
    before = logits.copy()
    rows = [
        row_of(dataclasses.replace(GREEDY, repetition_penalty=1.5), range(50)),
        row_of(SamplingParams(seed=1, frequency_penalty=1.0), (), range(50)),
    ]
    assert sampler.sample(logits, rows) == sampler.sample(logits, rows)
    np.testing.assert_array_equal(logits, before)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    """Such a bundle is damaged; slicing would hide it."""
    with pytest.raises(EngineError, match="1003"):
        Sampler(SESSION, VOCAB + 1)


def test_rows_that_take_more_rounds_keep_their_own_logprobs(sampler: Sampler) -> None:
    """Rows are scored together after drawing, which does not end in their order."""
    logits = random_logits(12, batch=3, spread=0.01)
    logits[1] = random_logits(13, spread=9.0)
    # The flat rows need more candidates than fetched at first, the peaked one does not.
    rows = [
        row_of(SamplingParams(seed=s, temperature=1.5, top_p=0.99, logprobs=3)) for s in (1, 2, 3)
    ]
    together = sampler.sample(logits, rows)
    assert together == [draw(sampler, logits[index], row) for index, row in enumerate(rows)]


def test_given_tokens_are_scored_as_drawn_ones_are(sampler: Sampler) -> None:
    """Logprobs of a prompt's tokens are the model's own, too."""
    logits = random_logits(14, batch=4)
    params = SamplingParams(seed=5, logprobs=3)
    drawn = sampler.sample(logits, [row_of(params) for _ in range(4)])
    ids = [one.token_id for one in drawn if isinstance(one, Sampled)]
    assert sampler.score(logits, ids, 3) == drawn
    logits[2, 5] = np.nan
    with pytest.raises(EngineError, match="NaN"):
        sampler.score(logits, ids, 3)
