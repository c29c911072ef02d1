"""Damaged and hostile GGUF files: a clear refusal or a whole bundle, in bounded time and memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp_convert as llama_cpp
import numpy as np
import pytest
from damage import flip, flipped, memory_bounded, place, tried_export
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_llama import Shape, write_tiny_gguf

from ortolan.errors import CheckpointError
from ortolan.export.gguf_reader import GgufCheckpoint

LIES = [0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1]


@dataclass(frozen=True)
class Intact:
    """A whole file's bytes, and how many of them are its header."""

    data: bytes = field(repr=False)
    header_bytes: int


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Intact:
    path = tmp_path_factory.mktemp("intact") / "model.gguf"
    types = {"*": "Q4_1", "token_embd*": "Q8_0"}
    write_tiny_gguf(path, types=types, shape=Shape(layers=1))
    return intact_file(path)


@pytest.fixture(scope="module")
def intact_formats(tmp_path_factory: pytest.TempPathFactory) -> Intact:
    """Blocks of 256 with scales within scales, indices into grids, 8-bit floats."""
    path = tmp_path_factory.mktemp("intact") / "model.gguf"
    kinds = ("Q2_K", "Q4_K", "IQ1_M", "IQ2_XXS", "IQ3_S", "MXFP4", "NVFP4")
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    types = {f"*{part}*": kind for part, kind in zip(parts, kinds, strict=True)}
    shape = Shape(layers=1, hidden=256, heads=16, inner=256)
    write_tiny_gguf(path, types={"*": "Q6_K", **types}, shape=shape)
    return intact_file(path)


@pytest.fixture(scope="module")
def intact_phi3(tmp_path_factory: pytest.TempPathFactory) -> Intact:
    """Fused matrices, a window, rope factors in tensors."""
    path = tmp_path_factory.mktemp("intact") / "model.gguf"
    keys, tensors = llama_cpp.as_family("phi3")
    keys |= {"phi3.rope.scaling.original_context_length": 32, "phi3.attention.sliding_window": 9}
    tensors |= {f"rope_factors_{n}.weight": np.ones(8, np.float32) for n in ("long", "short")}
    return intact_file(llama_cpp.write(path, "phi3", keys, tensors))


def intact_file(path: Path) -> Intact:
    tensors = GgufCheckpoint(path)._stored.values()
    return Intact(path.read_bytes(), min(tensor.data_offset for tensor in tensors))


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """What a damaged file says must not be believed when memory is taken."""
    with memory_bounded():
        yield


def try_export(data: bytes) -> str | None:
    """The refusal's message, or None for a whole bundle; anything else fails the test."""

    def write(folder: Path) -> Path:
        (folder / "model.gguf").write_bytes(data)
        return folder / "model.gguf"

    found = tried_export(write, refusals=(CheckpointError,))
    return found if isinstance(found, str) else None


def test_the_intact_files_export(
    intact: Intact, intact_formats: Intact, intact_phi3: Intact
) -> None:
    """Without this, the fuzzing below could refuse everything and pass."""
    for file in (intact, intact_formats, intact_phi3):
        assert try_export(file.data) is None


@settings(max_examples=120, deadline=None, derandomize=True)
@given(in_header=st.lists(flip, max_size=3), anywhere=st.lists(flip, max_size=2))
@example(in_header=[], anywhere=[])
def test_flipped_bits_are_refused_or_export_whole(
    intact: Intact, in_header: list[tuple[float, int]], anywhere: list[tuple[float, int]]
) -> None:
    """A bad disk or download gives one sentence, not a traceback, a hang or a dead machine."""
    data = flipped(intact.data, in_header, intact.header_bytes)
    try_export(flipped(data, anywhere, len(data)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    in_header=st.lists(flip, max_size=2),
    anywhere=st.lists(flip, max_size=2),
    phi3=st.booleans(),
)
def test_flipped_bits_in_other_forms_are_refused_or_export_whole(
    intact_formats: Intact,
    intact_phi3: Intact,
    in_header: list[tuple[float, int]],
    anywhere: list[tuple[float, int]],
    phi3: bool,
) -> None:
    """The same for the other block formats, and for settings that are lists of numbers."""
    file = intact_phi3 if phi3 else intact_formats
    data = flipped(file.data, in_header, file.header_bytes)
    try_export(flipped(data, anywhere, len(data)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(place=place, lie=st.sampled_from(LIES), size=st.sampled_from([4, 8]))
def test_numbers_replaced_in_the_header_are_refused_or_export_whole(
    intact: Intact, place: float, lie: int, size: int
) -> None:
    """Counts and lengths are what a reader allocates by."""
    at = int(place * (intact.header_bytes - 8))
    data = bytearray(intact.data)
    data[at : at + size] = (lie % 2 ** (8 * size)).to_bytes(size, "little")
    try_export(bytes(data))


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie > 2**16])
def test_lying_counts_and_lengths_are_refused_at_once(intact: Intact, lie: int) -> None:
    """The gguf package alone would build 2^63 empty arrays for one of these."""
    tokens = intact.data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    types = intact.data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type")
    tensor = intact.data.index(b"token_embd.weight")
    places = {
        "tensor count": 8,
        "pair count": 16,
        "key length": 24,
        "array of strings": tokens + 8,
        "string in an array": tokens + 16,
        "array of numbers": types + 8,
        "tensor name": tensor - 8,
        "dimension": tensor + len(b"token_embd.weight") + 4,
        "offset": tensor + len(b"token_embd.weight") + 4 + 16 + 4,
    }
    for name, at in places.items():
        data = bytearray(intact.data)
        data[at : at + 8] = struct.pack("<Q", lie)
        message = try_export(bytes(data))
        assert message is not None, name
        assert "cut short" in message, name


def test_an_array_of_numbers_that_runs_past_its_end_is_refused_early(intact: Intact) -> None:
    """A length that still fits into a large file must not make an object of each byte after it."""
    types = intact.data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type")
    data = bytearray(intact.data) + bytes(20 << 20)
    data[types + 8 : types + 16] = struct.pack("<Q", 5 << 20)
    assert "an array of 5,242,880 items" in str(try_export(bytes(data)))


def test_arrays_within_arrays_are_refused(intact: Intact) -> None:
    """Ten thousand of them, one in another, exhaust the stack of a reader that recurses."""
    key = b"tokenizer.ggml.add_bos_token"
    at = intact.data.index(key) + len(key)
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10_000 + struct.pack("<IQ", 4, 0)
    data = intact.data[:at] + nested + intact.data[at + 5 :]
    assert "array of arrays" in str(try_export(data))


def test_names_with_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """A tensor's name can hold escape sequences that rewrite what was printed above."""
    extra = {"\x1b[2J\nfine\x07": np.ones(4, np.float32)}
    data = write_tiny_gguf(tmp_path / "model.gguf", extra=extra).read_bytes()
    assert "\\x1b[2J" in str(try_export(data))
    override = {"llama.\x1b[2J": 1}
    data = write_tiny_gguf(tmp_path / "model.gguf", override=override).read_bytes()
    assert "\\x1b[2J" in str(try_export(data))


def test_an_enormous_value_does_not_fill_the_terminal(tmp_path: Path) -> None:
    """Some settings are lists of thousands of numbers."""
    override = {"llama.attention.unknown": list(range(5000))}
    data = write_tiny_gguf(tmp_path / "model.gguf", override=override).read_bytes()
    assert len(str(try_export(data))) < 300
