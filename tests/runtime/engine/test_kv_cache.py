"""The KV cache takes the memory of the tokens in it, and gives it back."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from ortolan.errors import EngineError
from ortolan.graphs.contract import KvDtype
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine.kv_cache import KvCache, bytes_per_token, padded_capacity

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_context=65536,
    tie_embeddings=True,
)
SLOT_BYTES = 3 * 2 * 2 * 65536 * 16 * 4


def resident_bytes() -> int:
    status = Path("/proc/self/smaps_rollup")
    if not status.exists():
        pytest.skip("this system does not tell resident memory by /proc")
    found = re.search(r"^Anonymous:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_rows_are_views_of_one_array() -> None:
    """Bound buffers must be the cache itself: a copy would be written and lost."""
    cache = KvCache(CONFIG, slots=4, capacity=32)
    assert cache.rows(2, 1, 1, 2).shape == (2, 2, 32, 16)
    cache.rows(2, 1, 1, 1)[0, 0, 0, 0] = 7
    assert cache.rows(2, 1, 0, 4)[1, 0, 0, 0] == 7
    assert cache.rows(2, 0, 0, 4)[1, 0, 0, 0] == 0
    assert cache.rows(0, 0, 1, 3).flags.c_contiguous


def test_unused_slots_take_no_memory() -> None:
    """Slots are laid out for the longest context, which few requests reach."""
    before = resident_bytes()
    cache = KvCache(CONFIG, slots=64, capacity=65536)
    cache.rows(0, 0, 63, 1)[0, 0, 0] = 1
    assert resident_bytes() - before < SLOT_BYTES


def fill(cache: KvCache, slot: int, value: float) -> None:
    cache.array[:, slot] = value


def test_discarded_tokens_give_their_memory_back() -> None:
    """Memory must follow the requests that run, not the longest that ever ran."""
    cache = KvCache(CONFIG, slots=4, capacity=65536)
    before = resident_bytes()
    fill(cache, 1, 1)
    assert resident_bytes() - before > 0.9 * SLOT_BYTES
    cache.discard(1, 65536)
    assert resident_bytes() - before < 0.1 * SLOT_BYTES


def test_discarding_touches_no_other_slot() -> None:
    """A page may belong to two slots, or two heads."""
    cache = KvCache(CONFIG, slots=3, capacity=33)  # slots that do not end on pages
    for slot in range(3):
        fill(cache, slot, slot + 1)
    cache.discard(1, 33)
    np.testing.assert_array_equal(cache.array[:, 0], 1)
    np.testing.assert_array_equal(cache.array[:, 2], 3)


def test_copy_takes_the_first_tokens_alone() -> None:
    cache = KvCache(CONFIG, slots=3, capacity=32)
    fill(cache, 0, 1)
    fill(cache, 2, 3)
    cache.copy(0, 2, 5)
    np.testing.assert_array_equal(cache.array[:, 2, :, :5], 1)
    np.testing.assert_array_equal(cache.array[:, 2, :, 5:], 3)


def test_impossible_size_says_what_to_lower() -> None:
    with pytest.raises(EngineError, match=r"GiB.*lower max_slots or max_context"):
        KvCache(CONFIG, slots=1 << 30, capacity=65536)


DTYPES: dict[KvDtype, tuple[int, str]] = {
    "float32": (4, "tensor(float)"),
    "float16": (2, "tensor(float16)"),
    "bfloat16": (2, "tensor(bfloat16)"),
    "int8": (1, "tensor(int8)"),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_is_bound_as_what_it_holds(dtype: KvDtype) -> None:
    """numpy has no bfloat16, and ONNX Runtime refuses integers in its place."""
    size, bound_as = DTYPES[dtype]
    cache = KvCache(CONFIG, 4, 32, dtype)
    value = cache.value(2, 1, 1, 2)
    assert value.data_type() == bound_as
    assert list(value.shape()) == [2, 2, 32, 16]
    assert value.data_ptr() == cache.rows(2, 1, 1, 2).ctypes.data
    assert cache.array.itemsize == size
    assert bytes_per_token(CONFIG, dtype) == 3 * 2 * 2 * 16 * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("context", [2, 17, 2048, 8192, 131_072])
def test_heads_are_an_odd_number_of_pages_apart(
    context: int, head_dim: int, dtype: KvDtype
) -> None:
    """A power of two would put the keys of all rows and heads into the same sets of a cache."""
    capacity, size = padded_capacity(context, head_dim, dtype), DTYPES[dtype][0]
    pages, rest = divmod(capacity * head_dim * size, mmap.PAGESIZE)
    assert rest == 0
    assert pages % 2 == 1
    assert capacity >= context
    assert capacity % 2 == 0
    assert capacity - context < 2 * mmap.PAGESIZE // size // 16
