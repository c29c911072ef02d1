"""GGUF's block formats as codes, scales and offsets, against the gguf package's own arithmetic."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType

from ortolan.export.gguf_blocks import BLOCK_FORMATS
from ortolan.export.weights import Weight, stack_rows

ROWS, COLUMNS = 64, 256
BLOCKED = [kind for kind, block in BLOCK_FORMATS.items() if block.format.blocked]
FLOAT_DTYPES: dict[GgmlType, Any] = {GgmlType.F32: np.float32, GgmlType.F16: np.float16}


def read(kind: GgmlType, raw: np.ndarray) -> Weight:
    """As the reader does it: F32 and F16 come with their dtype, all others as bytes."""
    block = BLOCK_FORMATS[kind]
    return block.read(raw.view(FLOAT_DTYPES.get(kind, np.uint8)), block.format)


def random_bytes(kind: GgmlType, seed: int = 0) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (ROWS, COLUMNS // block * size), dtype=np.uint8)


def magnitude(weight: Weight) -> Any:
    """|d| max|q| + |m| of each element's block: what float32 rounding is relative to."""
    if weight.scale is None:
        return np.abs(weight.codes.astype(np.float32))
    codes = 128 if weight.format.bits == 8 else 8
    size = np.abs(weight.scale) * codes
    if weight.offset is not None:
        size = size * 2 + np.abs(weight.offset)
    return np.repeat(size, weight.format.block_size, axis=1)


def test_the_formats_of_this_version_are_all_here() -> None:
    """The other tests walk this table: an empty one would pass them all."""
    names = {kind.name for kind in BLOCK_FORMATS}
    assert names == {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity minus infinity
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", BLOCK_FORMATS, ids=lambda kind: kind.name)
def test_random_bytes_dequantize_as_gguf_does(kind: GgmlType) -> None:
    """Every byte pattern is a possible block; only scales that are not finite may differ."""
    raw = random_bytes(kind)
    weight = read(kind, raw)
    found, expected = weight.dequantized(), gguf.quants.dequantize(raw, kind)
    assert found.dtype == np.float32
    assert found.shape == (ROWS, COLUMNS)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.9
    error = np.abs(found - expected)[finite]
    assert (error <= 4 * np.finfo(np.float32).eps * magnitude(weight)[finite]).all()
    if not weight.format.affine:  # without an offset nothing is even rounded
        np.testing.assert_array_equal(found[finite], expected[finite])


@pytest.mark.parametrize("kind", BLOCK_FORMATS, ids=lambda kind: kind.name)
def test_quantized_weights_dequantize_as_gguf_does(kind: GgmlType) -> None:
    """What real files hold."""
    values = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    raw = gguf.quants.quantize(values, kind)
    weight = read(kind, raw)
    expected = gguf.quants.dequantize(raw, kind)
    error = np.abs(weight.dequantized() - expected)
    assert (error <= 2 * np.finfo(np.float32).eps * magnitude(weight)).all()
    np.testing.assert_allclose(weight.dequantized(), values, atol=0.4)


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_codes_fit_their_bits_and_keep_every_byte(kind: GgmlType) -> None:
    """A code out of range would be cut off in silence when it is packed."""
    weight = read(kind, random_bytes(kind))
    limit = 1 << (weight.format.bits - 1)
    assert weight.codes.dtype == np.int8
    assert weight.codes.shape == (ROWS, COLUMNS)
    assert (int(weight.codes.min()), int(weight.codes.max())) == (-limit, limit - 1)
    assert weight.scale is not None
    assert weight.scale.dtype == np.float32
    assert weight.scale.shape == (ROWS, COLUMNS // 32)
    assert (weight.offset is not None) == weight.format.affine


def test_a_block_worked_by_hand() -> None:
    """Scale 0.5 and minimum -1; the first byte holds codes 3 (element 0) and 12 (element 16)."""
    half = np.array([0.5, -1.0], np.float16).view(np.uint8)
    raw = np.concatenate([half, [0xC3], np.zeros(15, np.uint8)]).astype(np.uint8)[None]
    weight = read(GgmlType.Q4_1, raw)
    assert weight.codes[0, [0, 1, 16]].tolist() == [3 - 8, -8, 12 - 8]
    assert weight.dequantized()[0, [0, 1, 16]].tolist() == [0.5, -1.0, 5.0]


@pytest.mark.parametrize("kind", BLOCK_FORMATS, ids=lambda kind: kind.name)
def test_reordered_and_stacked_rows_stay_exact(kind: GgmlType) -> None:
    """q and k rows are put in another order, and q, k and v are stored as one."""
    values = np.random.default_rng(2).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    weight = read(kind, gguf.quants.quantize(values, kind))
    order = np.random.default_rng(3).permutation(ROWS)
    both = stack_rows([weight, weight.take_rows(order)]).dequantized()
    np.testing.assert_array_equal(both[:ROWS], weight.dequantized())
    np.testing.assert_array_equal(both[ROWS:], weight.dequantized()[order])


def test_rows_of_q_and_k_come_back_in_halves() -> None:
    """GGUF interleaves the two halves of each head; the order must undo exactly that."""
    from ortolan.export.gguf_llama import model_config, rotary_rows

    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.feed_forward_length": 64,
        "llama.block_count": 1,
        "llama.context_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 10,
    }
    config = model_config("x.gguf", metadata, tied=True)
    for name, heads in (("q_proj", 4), ("k_proj", 2)):
        halves = np.arange(heads * 16)
        # How llama.cpp's converter permutes: convert_hf_to_gguf.py, LlamaModel.permute.
        permuted = halves.reshape(heads, 2, 8).swapaxes(1, 2).reshape(-1)
        order = rotary_rows(config, f"model.layers.0.self_attn.{name}")
        assert order is not None
        np.testing.assert_array_equal(permuted[order], halves)
    assert rotary_rows(config, "model.layers.0.self_attn.v_proj") is None
