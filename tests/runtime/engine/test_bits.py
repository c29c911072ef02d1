"""Same request, same bits: chunking, batching, padding and reuse change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ortolan import SamplingParams
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.chunks import chunk_sizes
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig

CONTEXT = 512
ROWS = 16
LENGTH = 131


# Exact accuracy is slower by an order of magnitude.
@pytest.fixture(scope="module", params=["default", pytest.param("exact", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest, smollm2_bundle: Path) -> Iterator[LLM]:
    config = EngineConfig(max_context=CONTEXT, max_slots=ROWS, accuracy=request.param)
    with LLM(Bundle.open(smollm2_bundle), config) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(llm: LLM) -> Engine:
    return llm._running()


@pytest.fixture(scope="module")
def ids(root: Path, llm: LLM) -> list[int]:
    text = (root / "ortolan" / "heldout.txt").read_text(encoding="utf-8")
    return llm.encode(text)[:LENGTH]


def stored(engine: Engine, slot: int, tokens: int) -> np.ndarray:
    """The slot's keys and values [layers * 2, kv_heads, tokens, head_dim]."""
    return engine._model.cache.array[:, slot, :, :tokens].copy()


def prefill(
    engine: Engine, ids: list[int], chunk: int, slot: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Logits after the last token, and the KV of all, read in pieces of `chunk`."""
    start = 0
    for size in chunk_sizes(len(ids), chunk):
        piece = ids[start : start + size]
        logits = engine._model.prefill(slot, [piece], [start], [[size - 1]])
        start += size
    return logits[0, 0].copy(), stored(engine, slot, len(ids))


@pytest.mark.parametrize("chunk", [2, 7, 64])
def test_chunk_size_does_not_change_a_bit(engine: Engine, ids: list[int], chunk: int) -> None:
    """The engine cuts prompts to suit its load; an answer must not tell how."""
    whole_logits, whole_kv = prefill(engine, ids, len(ids))
    logits, kv = prefill(engine, ids, chunk, slot=2)
    np.testing.assert_array_equal(logits, whole_logits)
    np.testing.assert_array_equal(kv, whole_kv)


@pytest.mark.parametrize("length", [33, 129])
def test_length_just_past_a_tile_does_not_change_a_bit(
    engine: Engine, ids: list[int], length: int
) -> None:
    """A single row left over in a kernel's tile would be computed by other code."""
    whole_logits, whole_kv = prefill(engine, ids[:length], CONTEXT)
    logits, kv = prefill(engine, ids[:length], 16, slot=2)
    np.testing.assert_array_equal(logits, whole_logits)
    np.testing.assert_array_equal(kv, whole_kv)


def test_padded_rows_are_the_same_as_rows_alone(engine: Engine, ids: list[int]) -> None:
    """Prompts of different lengths share a call, padded on the right."""
    lengths = [LENGTH, 60, 97, 2, LENGTH, 33]
    chunk = [ids[:n] for n in lengths]
    last = [[n - 1] for n in lengths]
    together = engine._model.prefill(0, chunk, [0] * len(lengths), last)[:, 0].copy()
    kv = [stored(engine, row, n) for row, n in enumerate(lengths)]
    for row, length in enumerate(lengths):
        alone_logits, alone_kv = prefill(engine, ids[:length], length)
        np.testing.assert_array_equal(together[row], alone_logits)
        np.testing.assert_array_equal(kv[row], alone_kv)


def test_padded_rows_continue_from_different_pasts(engine: Engine, ids: list[int]) -> None:
    """Later chunks of several prompts share calls too."""
    whole_logits, whole_kv = prefill(engine, ids, LENGTH)
    starts = [0, 40, 77, 129]
    for row, start in enumerate(starts):
        if start:
            prefill(engine, ids[:start], start, slot=row)
    chunk = [ids[start:] for start in starts]
    last = [[len(piece) - 1] for piece in chunk]
    logits = engine._model.prefill(0, chunk, starts, last)
    for row in range(len(starts)):
        np.testing.assert_array_equal(logits[row, 0], whole_logits)
        np.testing.assert_array_equal(stored(engine, row, LENGTH), whole_kv)


@pytest.mark.parametrize("rows", [2, 3, 8, 16])
def test_one_row_decodes_to_the_bits_of_many(engine: Engine, ids: list[int], rows: int) -> None:
    """Temperature 0 gives the same tokens whatever else is running (vllm#23138)."""
    lengths = [LENGTH, *(5 + 3 * row for row in range(1, rows))]
    # A slot's idle neighbour is written at exact accuracy, so the row alone goes first.
    prefill(engine, ids, LENGTH)
    alone = engine._model.decode(0, [504], [LENGTH])[0].copy()
    alone_kv = stored(engine, 0, LENGTH + 1)
    for row, length in enumerate(lengths):
        prefill(engine, ids[:length], LENGTH, slot=row)
    together = engine._model.decode(0, [504] + [ids[3]] * (rows - 1), lengths)
    np.testing.assert_array_equal(together[0], alone)
    np.testing.assert_array_equal(stored(engine, 0, LENGTH + 1), alone_kv)


def test_reused_prefix_gives_the_same_answer(llm: LLM, ids: list[int]) -> None:
    """A second turn starts after the first prompt, and nobody can tell (rule 1b)."""
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)

    def answer(prompt: list[int]) -> tuple[list[object], int]:
        events = list(llm.stream(prompt, greedy))
        assert events[-1].usage is not None
        return [(e.token_id, e.logprob, e.top_logprobs) for e in events], events[
            -1
        ].usage.cached_tokens

    other = list(reversed(ids))
    fresh, cached = answer(ids)
    assert cached == 0
    assert answer(ids) == (fresh, len(ids) // 16 * 16)  # whole blocks
    longer, cached = answer([*ids, *other[:40]])
    assert cached == len(ids) // 16 * 16  # the first answer's own tokens are read again, not reused
    answer(other)
    llm._running().forget_prefixes()
    assert answer([*ids, *other[:40]]) == (longer, 0)


def test_prompt_of_one_token_leaves_nothing_to_reuse(llm: LLM, ids: list[int]) -> None:
    """Its KV was computed by a single row, to other bits (rule 1a)."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)
    llm._running().forget_prefixes()
    fresh = list(llm.stream(ids[:5], params))
    llm._running().forget_prefixes()
    list(llm.stream(ids[:1], params))
    assert list(llm.stream(ids[:5], params)) == fresh


def test_decoding_agrees_with_recomputing(llm: LLM, ids: list[int]) -> None:
    """KV that decode wrote is the KV of the same tokens read as a prompt, within rounding."""
    engine = llm._running()
    recomputed = llm.logits(ids)
    prefill(engine, ids[:100], 100)
    # int8 activations turn a last-bit difference into a rounding step, so more is allowed there.
    tolerance = 2e-3 if llm.config.accuracy == "exact" else 1.5
    for position in range(100, 120):
        logits = engine._model.decode(0, [ids[position]], [position])[0]
        assert np.abs(logits - recomputed[position]).max() < tolerance


@pytest.mark.parametrize(
    ("tokens", "chunk", "sizes"),
    [
        (1, 512, [1]),
        (2, 512, [2]),
        (512, 512, [512]),
        (33, 512, [31, 2]),
        (129, 512, [127, 2]),
        (513, 512, [511, 2]),
        (545, 1024, [543, 2]),
        (514, 512, [512, 2]),
        (1025, 512, [512, 511, 2]),
        (3, 2, [3]),
        (5, 2, [2, 3]),
        (7, 3, [3, 2, 2]),
    ],
)
def test_no_chunk_leaves_a_single_row_over(tokens: int, chunk: int, sizes: list[int]) -> None:
    """A one-token call computes other bits, so it may only happen to a one-token prompt."""
    assert chunk_sizes(tokens, chunk) == sizes
