"""The sampling graph against numpy in float64, and its promise of equal bits."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ortolan.graphs.sample import build_sample_graph
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads

VOCAB = 1003  # odd, so that rows start at every alignment


def make_session(vocab_size: int) -> ort.InferenceSession:
    use_threads(None)
    model = ir.to_proto(build_sample_graph(vocab_size)).SerializeToString()
    return ort.InferenceSession(model, session_options({}), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def session() -> ort.InferenceSession:
    return make_session(VOCAB)


def run(session: ort.InferenceSession, logits: Any, **inputs: Any) -> list[np.ndarray]:
    batch, vocab_size = logits.shape
    feeds: dict[str, Any] = {
        "logits": logits,
        "adjust_ids": np.zeros((batch, 1), np.int64),
        "adjust_scale": np.ones((batch, 1), np.float32),
        "adjust_bias": np.zeros((batch, 1), np.float32),
        "temperature": np.ones(batch, np.float32),
        "num_valid": np.array([vocab_size]),
        "k": np.array([5]),
    }
    return list(session.run(None, feeds | inputs))


def random_logits(batch: int, vocab_size: int = VOCAB, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((batch, vocab_size)) * 3).astype(np.float32)


def log_sum_exp(logits: np.ndarray, temperature: float) -> np.ndarray:
    wide = logits.astype(np.float64)
    shifted = (wide - wide.max(1, keepdims=True)) / temperature
    return np.asarray(np.log(np.exp(shifted).sum(1)))


def test_graph_is_valid_and_loads_on_older_providers() -> None:
    """Wheels of other providers lag behind: IR version 10, opset at most 24, no custom domain."""
    model = build_sample_graph(VOCAB)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 10
    assert {opset.domain: opset.version for opset in proto.opset_import} == {"": 21}
    assert [value.name for value in model.graph.outputs] == [
        "candidate_ids",
        "candidate_logits",
        "candidate_raw_logits",
        "log_sum_exp",
    ]


def test_candidates_are_the_likeliest_tokens_in_order(session: ort.InferenceSession) -> None:
    """Everything drawn later leans on this order."""
    logits = random_logits(3)
    ids, values, raw, total = run(session, logits, k=np.array([7]))
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, 1))
    np.testing.assert_array_equal(raw, values)
    np.testing.assert_allclose(total, log_sum_exp(logits, 1.0), rtol=0, atol=2e-6)


@pytest.mark.parametrize("k", [1, 3, 64, 700, VOCAB])
def test_ties_go_to_the_lower_id(session: ort.InferenceSession, k: int) -> None:
    """Greedy answers must not depend on which top-k algorithm a size selects."""
    logits = np.round(random_logits(2) / 3).astype(np.float32)
    ids, *_ = run(session, logits, k=np.array([k]))
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :k])


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 5.0])
def test_probabilities_sum_to_one(session: ort.InferenceSession, temperature: float) -> None:
    """The documented formula is all that a caller needs."""
    logits = random_logits(2)
    _, values, _, total = run(
        session,
        logits,
        temperature=np.full(2, temperature, np.float32),
        k=np.array([VOCAB]),
    )
    shifted = (values.astype(np.float64) - values[:, :1]) / temperature - total[:, None]
    np.testing.assert_allclose(np.exp(shifted).sum(1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(total, log_sum_exp(logits, temperature), rtol=0, atol=5e-6)


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-30])
def test_tiny_temperatures_neither_overflow_nor_blur(
    session: ort.InferenceSession, temperature: float
) -> None:
    """logits / 1e-8 has no digits left in float32 for the difference of two near tokens."""
    logits = random_logits(2)
    logits[0, 5] = logits[0, 900] = 30.0  # tied: log-sum-exp is log 2
    logits[1, 7], logits[1, 8] = 30.0, np.nextafter(np.float32(30.0), np.float32(0))
    *_, total = run(session, logits, temperature=np.full(2, temperature, np.float32))
    np.testing.assert_allclose(total, log_sum_exp(logits, temperature), rtol=0, atol=1e-6)


def test_adjustments_start_from_the_original_logits(session: ort.InferenceSession) -> None:
    """Positive logits are divided, others multiplied; a repeated entry must not count twice."""
    logits = np.full((2, VOCAB), -9.0, np.float32)
    logits[0, :4] = [4.0, -2.0, 1.0, 0.0]
    logits[1, :2] = [3.0, 2.0]
    ids, values, raw, total = run(
        session,
        logits,
        adjust_ids=np.array([[0, 1, 3, 0], [1, 1, 1, 1]]),
        adjust_scale=np.array([[2, 2, 2, 2], [1, 1, 1, 1]], np.float32),
        adjust_bias=np.array([[0.5, 0.5, -8, 0.5], [5, 5, 5, 5]], np.float32),
        k=np.array([4]),
    )
    # Row 0: 4 / 2 + 0.5, -2 * 2 + 0.5, 1, 0 - 8. Row 1: 3, 2 + 5.
    np.testing.assert_array_equal(ids[0], [0, 2, 1, 3])
    np.testing.assert_array_equal(values[0], [2.5, 1.0, -3.5, -8.0])
    np.testing.assert_array_equal(raw[0], [4.0, 1.0, -2.0, 0.0])
    np.testing.assert_array_equal(ids[1, :2], [1, 0])
    np.testing.assert_array_equal(values[1, :2], [7.0, 3.0])
    adjusted = logits.copy()
    adjusted[0, :4] = [2.5, -3.5, 1.0, -8.0]
    adjusted[1, :2] = [3.0, 7.0]
    np.testing.assert_allclose(total, log_sum_exp(adjusted, 1.0), rtol=0, atol=2e-6)
    assert logits[0, 0] == 4.0, "the caller's logits must stay as they are"


def test_ids_past_the_tokenizer_are_no_candidates(session: ort.InferenceSession) -> None:
    """Padding rows of the vocabulary have logits too; detokenizing their ids would fail."""
    logits = random_logits(2)
    logits[:, 900:] = 50.0
    ids, _, _, total = run(session, logits, num_valid=np.array([900]), k=np.array([900]))
    np.testing.assert_array_equal(np.sort(ids, axis=1), np.tile(np.arange(900), (2, 1)))
    np.testing.assert_allclose(total, log_sum_exp(logits[:, :900], 1.0), rtol=0, atol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_shows_and_leaves_the_others_alone(
    session: ort.InferenceSession, bad: float
) -> None:
    """One request's NaN ends that request alone, wherever in the vocabulary it sits."""
    clean = run(session, random_logits(3))
    for position in [0, 1, 15, 16, 500, *range(VOCAB - 20, VOCAB)]:
        logits = random_logits(3)
        logits[1, position] = bad
        found = run(session, logits)
        assert np.isnan(found[3][1]), position
        for one, other in zip(clean, found, strict=True):
            np.testing.assert_array_equal(one[[0, 2]], other[[0, 2]])


def test_minus_infinity_excludes_a_token_and_nothing_else(session: ort.InferenceSession) -> None:
    """Masks are written as -inf; a row of nothing else has no distribution."""
    logits = random_logits(2)
    logits[0, 3:] = -np.inf
    logits[1, :] = -np.inf
    ids, _, _, total = run(session, logits, k=np.array([3]))
    assert set(ids[0]) == {0, 1, 2}
    np.testing.assert_allclose(total[0], log_sum_exp(logits[:1, :3], 1.0)[0], atol=1e-6)
    assert np.isnan(total[1])


@pytest.mark.parametrize("vocab_size", [VOCAB, 32001])
def test_a_row_has_the_same_bits_in_every_batch(vocab_size: int) -> None:
    """Same request, same bits: neither its neighbours, their number, nor k may show.

    The sum may differ in its last bits, which on the CPU nobody samples by.
    """
    session = make_session(vocab_size)
    logits = random_logits(16, vocab_size)
    rng = np.random.default_rng(1)
    inputs: dict[str, Any] = {
        "adjust_ids": rng.integers(0, vocab_size - 3, (16, 4)),
        "adjust_scale": np.full((16, 4), 1.3, np.float32),
        "adjust_bias": np.full((16, 4), -0.1, np.float32),
        "temperature": rng.uniform(0.3, 2, 16).astype(np.float32),
    }
    num_valid = np.array([vocab_size - 3])

    def part(rows: slice, k: int) -> list[np.ndarray]:
        chosen = {name: value[rows] for name, value in inputs.items()}
        return run(session, logits[rows], **chosen, num_valid=num_valid, k=np.array([k]))

    alone = [part(slice(row, row + 1), 64) for row in range(16)]
    for batch in range(1, 17):
        for first in {0, 16 - batch}:
            for k in (1, 9, 64):
                found = part(slice(first, first + batch), k)
                for place in range(batch):
                    expected = alone[first + place]
                    for one, other in zip(expected[:3], found[:3], strict=True):
                        assert one[0, :k].tobytes() == other[place].tobytes()
                    assert abs(expected[3][0] - found[3][place]) < 1e-6
