"""Same request, same bits, whatever the bundle computes in and keeps of each token.

The same rules as in test_bits.py, which holds them against the real model in float32; tiny models
have the kernels' tiles too, if their heads are as wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llama import Shape, write_tiny_gguf

from ortolan import SamplingParams
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.chunks import chunk_sizes
from ortolan.runtime.engine.model import Model
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig

SHAPE = Shape(hidden=128, heads=3, kv_heads=1, head_dim=64, context=512)
ROWS = 8
LENGTH = 163  # more than a tile of attention, which is 128 rows
IDS = np.random.default_rng(0).integers(3, SHAPE.vocab, LENGTH).tolist()
EXPORTS: dict[str, dict[str, Any]] = {
    "int8 kv": {"kv": "int8"},
    "float16": {"dtype": "float16"},
    "float16 with int8 kv": {"dtype": "float16", "kv": "int8"},
}


@pytest.fixture(scope="module", params=EXPORTS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read it, never write into it."""
    folder = tmp_path_factory.mktemp("bits")
    types = {"*": "Q4_1", "token_embd*": "Q8_0"}
    source = write_tiny_gguf(folder / "tiny.gguf", types=types, shape=SHAPE)
    export_bundle(str(source), folder / "bundle", ExportOptions(**EXPORTS[request.param]))
    return folder / "bundle"


@pytest.fixture(scope="module", params=["default", "exact"])
def llm(request: pytest.FixtureRequest, bundle: Path) -> Iterator[LLM]:
    config = EngineConfig(max_slots=ROWS, accuracy=request.param)
    with LLM(Bundle.open(bundle), config) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(llm: LLM) -> Model:
    found = llm._running()._model
    assert isinstance(found, Model)
    return found


def stored(model: Model, slot: int, tokens: int) -> np.ndarray:
    return model.cache.array[:, slot, :, :tokens].copy()


def prefill(
    model: Model, ids: list[int], chunk: int = SHAPE.context, slot: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Logits after the last token, and the KV of all, read in pieces of `chunk`."""
    start = 0
    for size in chunk_sizes(len(ids), chunk):
        piece = ids[start : start + size]
        logits = model.prefill(slot, [piece], [start], [[size - 1]])
        start += size
    return logits[0, 0].copy(), stored(model, slot, len(ids))


def same(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("length", [LENGTH, 33, 129])
@pytest.mark.parametrize("chunk", [2, 7, 64])
def test_chunk_size_does_not_change_a_bit(model: Model, chunk: int, length: int) -> None:
    """The engine cuts prompts to suit its load; an answer must not tell how."""
    same(prefill(model, IDS[:length], chunk, slot=2), prefill(model, IDS[:length]))


def test_padded_rows_are_the_same_as_rows_alone(model: Model) -> None:
    """Prompts of different lengths share a call, padded on the right."""
    lengths = [LENGTH, 60, 97, 2, LENGTH, 33]
    last = [[n - 1] for n in lengths]
    logits = model.prefill(0, [IDS[:n] for n in lengths], [0] * len(lengths), last)[:, 0].copy()
    kv = [stored(model, row, n) for row, n in enumerate(lengths)]
    for row, length in enumerate(lengths):
        same((logits[row], kv[row]), prefill(model, IDS[:length]))


def test_padded_rows_continue_from_different_pasts(model: Model) -> None:
    """Later chunks of several prompts share calls too."""
    whole = prefill(model, IDS)
    starts = [0, 40, 77, 161]
    for row, start in enumerate(starts):
        if start:
            prefill(model, IDS[:start], slot=row)
    chunk = [IDS[start:] for start in starts]
    logits = model.prefill(0, chunk, starts, [[len(piece) - 1] for piece in chunk])
    for row in range(len(starts)):
        same((logits[row, 0], stored(model, row, LENGTH)), whole)


@pytest.mark.parametrize("rows", [2, 3, ROWS])
def test_one_row_decodes_to_the_bits_of_many(model: Model, rows: int) -> None:
    """Temperature 0 gives the same tokens whatever else is running."""
    lengths = [LENGTH, *(5 + 3 * row for row in range(1, rows))]
    # A slot's idle neighbour is written at exact accuracy, so the row alone goes first.
    prefill(model, IDS)
    alone = model.decode(0, [77], [LENGTH])[0].copy(), stored(model, 0, LENGTH + 1)
    for row, length in enumerate(lengths):
        prefill(model, IDS[:length], slot=row)
    together = model.decode(0, [77] + [IDS[3]] * (rows - 1), lengths)
    same((together[0], stored(model, 0, LENGTH + 1)), alone)


def test_reused_prefix_gives_the_same_answer(llm: LLM) -> None:
    """What the prefix cache copies are the cache's own elements, of whatever dtype."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)

    def answer() -> tuple[list[object], int]:
        events = list(llm.stream(IDS, params))
        usage = events[-1].usage
        assert usage is not None
        return [(e.token_id, e.logprob, e.top_logprobs) for e in events], usage.cached_tokens

    llm._running().forget_prefixes()
    fresh, cached = answer()
    assert cached == 0
    assert answer() == (fresh, LENGTH // 16 * 16)


def test_decoding_agrees_with_recomputing(llm: LLM, model: Model) -> None:
    """KV that decode wrote is the KV of the same tokens read as a prompt, within rounding."""
    recomputed = llm.logits(IDS)
    prefill(model, IDS[:100])
    for position in range(100, 120):
        logits = model.decode(0, [IDS[position]], [position])[0]
        difference = np.linalg.norm(logits - recomputed[position])
        assert difference < 0.1 * np.linalg.norm(recomputed[position])
