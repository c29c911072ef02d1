"""Bundles of 8-bit products, and with weights of their own for each phase: same request, same bits.

The real model's bits are held by test_bits.py; a tiny one is enough for what is new here.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import Shape, write_tiny_gguf

from ortolan.errors import UsageError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.precision import Quantization
from ortolan.export.presets import PRESETS
from ortolan.graphs.manifest import Manifest
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.chunks import chunk_sizes
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.opening import open_engine
from ortolan.runtime.engine.sessions import decode_graph
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.text.tokenizer import Tokenizer

CONTEXT = 256
LENGTH = 131
OPTIONS = {
    "w8a8": ExportOptions(weights="w8a8"),
    "mixed": ExportOptions(prefill_weights="w8a8"),
    "balanced": ExportOptions(**PRESETS["balanced"].options()),
    # Blocks so large that products compute rows in pairs; see runtime/row_pairs.py.
    "int4": ExportOptions(weights="int4", quantization=Quantization(block_size=64)),
    "int8": ExportOptions(weights="int8", quantization=Quantization(block_size=128)),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("phases")
    shape = Shape(context=CONTEXT, layers=3)  # of which one has its last product in w8a8
    types = {"*": "Q4_1", "token_embd*": "Q8_0"}
    source = write_tiny_gguf(folder / "tiny.gguf", types=types, shape=shape)
    for name, options in OPTIONS.items():
        export_bundle(str(source), folder / name, options)
    return {name: folder / name for name in OPTIONS}


@pytest.fixture(
    scope="module",
    params=[
        ("w8a8", "auto"),
        ("mixed", "decode"),
        ("mixed", "decode_many"),
        ("balanced", "decode"),
        ("balanced", "decode_many"),
        ("int4", "auto"),
        ("int8", "auto"),
    ],
    ids="-".join,
)
def opened(
    request: pytest.FixtureRequest, bundles: dict[str, Path]
) -> tuple[Path, EngineConfig, Tokenizer]:
    name, graph = request.param
    config = EngineConfig(
        max_context=CONTEXT,
        max_slots=5,
        prefill_chunk=48,
        kv_tokens=160,  # tight enough to preempt
        prefix_cache_mb=16,
        decode_graph=graph,
    )
    return bundles[name], config, Tokenizer.open(bundles[name])


@pytest.fixture
def engine(opened: tuple[Path, EngineConfig, Tokenizer]) -> Engine:
    path, config, tokenizer = opened
    return open_engine(Bundle.open(path), config, tokenizer, checks=True)


@pytest.fixture
def ids() -> list[int]:
    return np.random.default_rng(3).integers(3, 300, LENGTH).tolist()


def prefill(engine: Engine, ids: list[int], chunk: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits after the last token, and the KV of all, read in pieces of `chunk`."""
    start = 0
    for size in chunk_sizes(len(ids), chunk):
        piece = ids[start : start + size]
        logits = engine._model.prefill(slot, [piece], [start], [[size - 1]])
        start += size
    return logits[0, 0].copy(), engine._model.cache.array[:, slot, :, :start].copy()  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk", [2, 7, 64])
def test_chunk_size_does_not_change_a_bit(engine: Engine, ids: list[int], chunk: int) -> None:
    """The engine cuts prompts to suit its load; an answer must not tell how."""
    whole = prefill(engine, ids, LENGTH, slot=0)
    cut = prefill(engine, ids, chunk, slot=2)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_one_row_decodes_to_the_bits_of_many(engine: Engine, ids: list[int], rows: int) -> None:
    """A scale for all rows at once would let neighbours into an answer."""
    lengths = [LENGTH, *(5 + 3 * row for row in range(1, rows))]
    for row, length in enumerate(lengths):
        prefill(engine, ids[:length], LENGTH, slot=row)
    alone = engine._model.decode(0, [17], [LENGTH])[0].copy()
    together = engine._model.decode(0, [17] + [ids[3]] * (rows - 1), lengths)
    np.testing.assert_array_equal(together[0], alone)


def random_request(chance: random.Random, ids: list[int]) -> Request:
    start = chance.choice([0, 0, 40])
    params = SamplingParams(
        max_tokens=chance.randint(10, 60),
        temperature=chance.choice([0.0, 1.0]),
        seed=chance.randrange(2**40),
        logprobs=2,
        ignore_eos=True,
    )
    return Request(ids[start : start + chance.choice([1, 2, 33, 60, 90])], params)


def said(engine: Engine, requests: list[Request]) -> list[list[object]]:
    """What each answered, bit for bit, all submitted at once."""
    handles = [engine.submit(request) for request in requests]
    while engine.step():
        pass
    return [
        sorted(
            (event.choice, place, event.token_ids, event.logprobs)
            for place, event in enumerate(handle.events)
        )
        for handle in handles
    ]


def by_choice(events: list[object]) -> list[object]:
    """Without the places, which say when choices were interleaved."""
    return [(event[0], event[2], event[3]) for event in events]  # type: ignore[index]


def test_answers_do_not_depend_on_who_else_runs(
    opened: tuple[Path, EngineConfig, Tokenizer], engine: Engine, ids: list[int]
) -> None:
    """Batches, chunks, preemption and replay, and cached prefixes, over two precisions."""
    path, config, tokenizer = opened
    chance = random.Random(5)
    requests = [random_request(chance, ids) for _ in range(16)]
    together = said(engine, requests)
    assert engine.stats().preemptions > 0
    alone = open_engine(Bundle.open(path), config, tokenizer, checks=True)
    for request, answer in zip(requests, together, strict=True):
        alone.forget_prefixes()
        assert by_choice(said(alone, [request])[0]) == by_choice(answer)


def test_phases_share_what_they_have_in_common(bundles: dict[str, Path]) -> None:
    """Each tensor is stored once: an embedding twice would be a third of a small model."""
    manifest = Manifest.read(bundles["mixed"])
    assert manifest.phases_differ
    own = {(g.phase, g.role) for g in manifest.weights if g.phase == "prefill"}
    assert own == {("prefill", role) for role in ("norm", "attention", "mlp")}
    assert not Manifest.read(bundles["w8a8"]).phases_differ


def test_many_slots_decode_with_prefills_weights(bundles: dict[str, Path]) -> None:
    """The choice is the engine's, made once, so that it is no matter of who else runs."""
    mixed = Manifest.read(bundles["mixed"])
    assert decode_graph(mixed, EngineConfig(max_slots=1)) == "decode"
    assert decode_graph(mixed, EngineConfig(max_slots=7)) == "decode"
    assert decode_graph(mixed, EngineConfig(max_slots=8)) == "decode_many"
    assert decode_graph(mixed, EngineConfig(max_slots=16)) == "decode_many"
    assert decode_graph(mixed, EngineConfig(max_slots=16, decode_graph="decode")) == "decode"
    assert decode_graph(Manifest.read(bundles["w8a8"]), EngineConfig(max_slots=16)) == "decode"


def test_a_graph_that_is_not_there_is_refused(bundles: dict[str, Path]) -> None:
    """Another one's results would be taken for its."""
    with pytest.raises(UsageError, match="decode_many, which this bundle does not have"):
        decode_graph(Manifest.read(bundles["w8a8"]), EngineConfig(decode_graph="decode_many"))


def test_both_decode_graphs_go_on_from_the_same_cache(bundles: dict[str, Path]) -> None:
    """Keys and values mean the same in both phases; they differ by rounding alone."""
    logits = []
    for graph in ("decode", "decode_many"):
        config = EngineConfig(max_context=CONTEXT, max_slots=2, decode_graph=graph)
        engine = open_engine(
            Bundle.open(bundles["mixed"]), config, Tokenizer.open(bundles["mixed"])
        )
        tokens = np.random.default_rng(4).integers(3, 300, 40).tolist()
        prefill(engine, tokens, 40, slot=0)
        logits.append(engine._model.decode(0, [9], [40])[0].copy())
    assert np.abs(logits[0] - logits[1]).max() < 0.1 * np.abs(logits[0]).max()
    assert not np.array_equal(*logits)


@pytest.mark.parametrize("name", OPTIONS)
def test_products_are_the_same_in_the_form_for_processors_without_vnni(
    bundles: dict[str, Path],
    ids: list[int],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the plain form overflows 16 bits in silence; integers are exact in either."""
    found = []
    for answer in (True, False):
        monkeypatch.setattr(
            "ortolan.runtime.engine.sessions.adds_bytes_in_16_bits", lambda answer=answer: answer
        )
        config = EngineConfig(
            max_context=CONTEXT, max_slots=4, cache_dir=str(tmp_path / f"{answer}")
        )
        tokenizer = Tokenizer.open(bundles[name])
        engine = open_engine(Bundle.open(bundles[name]), config, tokenizer)
        found.append(prefill(engine, ids, LENGTH, 0))
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)
