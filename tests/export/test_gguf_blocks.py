"""GGUF's tensor types as codes, scales and offsets, against the gguf package's own arithmetic."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from random_blocks import random_bytes, random_rows

from ortolan.export import gguf_blocks
from ortolan.export.gguf_blocks import BLOCK_FORMATS
from ortolan.export.gguf_model import rotary_rows
from ortolan.export.weights import Weight, stack_rows
from ortolan.graphs.formats import WeightFormat
from ortolan.graphs.manifest import ModelConfig

ROWS, COLUMNS = 64, 512
# The package's reader gives floats in their dtype, all else as bytes. It cannot dequantize Q1_0.
FLOAT_DTYPES: dict[GgmlType, Any] = {GgmlType.F32: np.float32, GgmlType.F16: np.float16}
KNOWN = [kind for kind in BLOCK_FORMATS if kind != GgmlType.Q1_0]
BLOCKED = [kind for kind in KNOWN if BLOCK_FORMATS[kind].format.blocked]

# The smallest and largest code that a block can hold.
CODES = {
    "Q4_0": (-8, 7),
    "Q4_1": (-8, 7),
    "Q5_0": (-16, 15),
    "Q5_1": (-16, 15),
    "Q8_0": (-128, 127),
    "Q2_K": (-2, 1),
    "Q3_K": (-4, 3),
    "Q4_K": (-8, 7),
    "Q5_K": (-16, 15),
    "Q6_K": (-32, 31),
    "IQ1_S": (-9, 9),
    "IQ1_M": (-9, 9),
    "IQ2_XXS": (-43, 43),
    "IQ2_XS": (-43, 43),
    "IQ2_S": (-43, 43),
    "IQ3_XXS": (-62, 62),
    "IQ3_S": (-15, 15),
    "IQ4_NL": (-127, 113),
    "IQ4_XS": (-127, 113),
    "TQ1_0": (-1, 1),
    "TQ2_0": (-1, 2),
    "MXFP4": (-12, 12),
    "NVFP4": (-12, 12),
}


def read(kind: GgmlType, raw: np.ndarray) -> Weight:
    return BLOCK_FORMATS[kind].read(raw.view(FLOAT_DTYPES.get(kind, np.uint8)))


def magnitude(weight: Weight) -> Any:
    """|d| max|q| + |m| of each element's block: what float32 rounding is relative to."""
    if weight.scale is None:
        return np.abs(weight.codes.astype(np.float32))
    size = np.abs(weight.scale) * (1 << (weight.format.bits - 1))
    if weight.offset is not None:
        size = size * 2 + np.abs(weight.offset)
    return np.repeat(size, weight.format.block_size, axis=1)


def test_every_type_that_stores_weights_is_here() -> None:
    """The other tests walk this table: an empty one would pass them all."""
    activations, integers = {"Q8_1", "Q8_K"}, {"I8", "I16", "I32", "I64"}
    names = {kind.name for kind in GgmlType} - activations - integers - {"F64"}
    assert {kind.name for kind in BLOCK_FORMATS} == names
    assert set(CODES) == {kind.name for kind in BLOCKED}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity minus infinity, in the package
@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.name)
def test_random_bytes_dequantize_as_gguf_does(kind: GgmlType) -> None:
    """Every byte pattern is a possible block; only scales that are not finite may differ."""
    raw = random_bytes(kind, ROWS, COLUMNS)
    weight = read(kind, raw)
    found, expected = weight.dequantized(), gguf.quants.dequantize(raw, kind)
    assert found.dtype == np.float32
    assert found.shape == (ROWS, COLUMNS)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.9
    error = np.abs(found - expected)[finite]
    assert (error <= 2 * np.finfo(np.float32).eps * magnitude(weight)[finite]).all()
    if not weight.format.affine:  # without an offset nothing is even rounded
        np.testing.assert_array_equal(found[finite], expected[finite])


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.name)
def test_sane_blocks_dequantize_as_gguf_does(kind: GgmlType) -> None:
    """What real files hold, where not one element may be left out."""
    if kind in FLOAT_DTYPES or kind == GgmlType.BF16:
        values = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)
        raw = gguf.quants.quantize(values, kind)
    else:
        raw = random_rows(kind, ROWS, COLUMNS)
    weight = read(kind, raw)
    error = np.abs(weight.dequantized() - gguf.quants.dequantize(raw, kind))
    assert (error <= 2 * np.finfo(np.float32).eps * magnitude(weight)).all()
    assert weight.is_finite()


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_codes_fit_their_bits_and_keep_every_value(kind: GgmlType) -> None:
    """A code out of range would be cut off in silence when it is packed."""
    weight = read(kind, random_bytes(kind, ROWS, COLUMNS))
    fmt = weight.format
    assert weight.codes.dtype == np.int8
    assert weight.codes.shape == (ROWS, COLUMNS)
    found = (int(weight.codes.min()), int(weight.codes.max()))
    assert found == CODES[kind.name]
    limit = 1 << (fmt.bits - 1)
    assert -limit <= found[0]
    assert found[1] < limit
    assert fmt.block_size in (16, 32, 256)  # powers of two from 16: what MatMulNBits takes
    for part in (weight.scale, weight.offset):
        assert part is None or (part.dtype, part.shape) == (
            np.float32,
            (ROWS, COLUMNS // fmt.block_size),
        )
    assert weight.scale is not None
    assert (weight.offset is not None) == fmt.affine


def test_a_block_worked_by_hand() -> None:
    """Scale 0.5 and minimum -1; the first byte holds codes 3 (element 0) and 12 (element 16)."""
    half = np.array([0.5, -1.0], np.float16).view(np.uint8)
    raw = np.concatenate([half, [0xC3], np.zeros(15, np.uint8)]).astype(np.uint8)[None]
    weight = read(GgmlType.Q4_1, raw)
    assert weight.codes[0, [0, 1, 16]].tolist() == [3 - 8, -8, 12 - 8]
    assert weight.dequantized()[0, [0, 1, 16]].tolist() == [0.5, -1.0, 5.0]


def test_one_bit_weights_are_plus_or_minus_the_scale() -> None:
    """Q1_0 worked by hand: 128 weights, the lowest bit of the first byte first, 1 is plus."""
    half = np.array([0.5], np.float16).view(np.uint8)
    raw = np.concatenate([half, [0b101], np.zeros(14, np.uint8), [0x80]]).astype(np.uint8)[None]
    weight = read(GgmlType.Q1_0, raw)
    assert str(weight.format) == "int4 block 128"
    expected = np.full(128, -0.5, np.float32)
    expected[[0, 2, 127]] = 0.5
    np.testing.assert_array_equal(weight.dequantized()[0], expected)


def test_weights_that_only_their_codes_make_infinite_are_found() -> None:
    """MXFP4's largest scales are finite, and twelve times them is not."""
    raw = random_rows(GgmlType.MXFP4, 2, 64)
    raw[1, :2] = 255, 0x22  # 2^127, twice the code for 2
    assert not read(GgmlType.MXFP4, raw).is_finite()
    raw[1, 1:17] = 0x11
    assert read(GgmlType.MXFP4, raw).is_finite()


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_reordered_and_stacked_rows_stay_exact(kind: GgmlType) -> None:
    """q and k rows are put in another order, and q, k and v are stored as one."""
    weight = read(kind, random_rows(kind, ROWS, COLUMNS))
    order = np.random.default_rng(3).permutation(ROWS)
    both = stack_rows([weight, weight.take_rows(order)]).dequantized()
    np.testing.assert_array_equal(both[:ROWS], weight.dequantized())
    np.testing.assert_array_equal(both[ROWS:], weight.dequantized()[order])


def test_large_tensors_are_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is temporary must not grow with the tensor; the pieces must fit together."""
    raw = random_rows(GgmlType.Q4_K, ROWS, COLUMNS)
    whole = read(GgmlType.Q4_K, raw)
    monkeypatch.setattr(gguf_blocks, "_SLAB", 5 * COLUMNS + 1)
    pieces = read(GgmlType.Q4_K, raw)
    np.testing.assert_array_equal(pieces.dequantized(), whole.dequantized())
    assert pieces.format == WeightFormat("int4", 32, affine=True)


@pytest.mark.parametrize("arch", ["llama", "smollm3", "granite", "qwen2", "qwen3", "phi3"])
def test_rows_of_q_and_k_come_back_in_halves(arch: str) -> None:
    """Some converters interleave the two halves of each head; the order must undo exactly that."""
    config = ModelConfig(
        architecture=arch,
        vocab_size=10,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_context=8,
        tie_embeddings=True,
    )
    for name, heads in (("q_proj", 4), ("k_proj", 2), ("k_proj.bias", 2)):
        order = rotary_rows(config, f"model.layers.0.self_attn.{name}")
        if arch in ("qwen2", "qwen3", "phi3"):
            assert order is None
            continue
        halves = np.arange(heads * 16)
        # How llama.cpp's converter permutes: convert_hf_to_gguf.py, LlamaModel.permute.
        permuted = halves.reshape(heads, 2, 8).swapaxes(1, 2).reshape(-1)
        assert order is not None
        np.testing.assert_array_equal(permuted[order], halves)
    assert rotary_rows(config, "model.layers.0.self_attn.v_proj") is None
