"""The KV cache takes the memory of the tokens in it, and gives it back."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ortolan.errors import EngineError
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine.kv_cache import KvCache

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


def test_released_slot_gives_its_memory_back_but_for_what_is_kept() -> None:
    """Memory must follow the requests that run, not the longest that ever ran."""
    cache = KvCache(CONFIG, slots=4, capacity=65536)
    cache.acquire(1)
    before = resident_bytes()
    for layer in range(3):
        for part in (0, 1):
            cache.rows(layer, part, 1, 1)[:] = 1
    assert resident_bytes() - before > 0.9 * SLOT_BYTES
    cache.release(1, keep=4096)
    assert resident_bytes() - before < 0.2 * SLOT_BYTES
    for layer in range(3):
        kept = cache.rows(layer, 0, 1, 1)[0]
        np.testing.assert_array_equal(kept[:, :4096], 1)
        np.testing.assert_array_equal(kept[:, 8192:], 0)


def test_release_touches_no_other_slot() -> None:
    cache = KvCache(CONFIG, slots=3, capacity=33)  # slots that do not end on pages
    for slot in range(3):
        cache.acquire(slot)
        for layer in range(3):
            cache.rows(layer, 1, slot, 1)[:] = slot + 1
    cache.release(1)
    for layer in range(3):
        np.testing.assert_array_equal(cache.rows(layer, 1, 0, 1), 1)
        np.testing.assert_array_equal(cache.rows(layer, 1, 2, 1), 3)


def test_slots_are_taken_and_given_back() -> None:
    cache = KvCache(CONFIG, slots=2, capacity=32)
    cache.acquire(0)
    assert cache.free_slots() == [1]
    cache.release(0)
    assert cache.free_slots() == [0, 1]


def test_impossible_size_says_what_to_lower() -> None:
    with pytest.raises(EngineError, match=r"GiB.*lower max_slots or max_context"):
        KvCache(CONFIG, slots=1 << 30, capacity=65536)
