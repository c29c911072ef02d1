"""The radix tree on its own: what is found, what goes first, what may not go."""

from __future__ import annotations

import numpy as np
import pytest
from mock_engine import CONFIG, CONTEXT

from ortolan.runtime.engine.kv_cache import KvCache
from ortolan.runtime.engine.prefix_cache import BLOCK, Path, PrefixCache

BLOCK_BYTES = BLOCK * CONFIG.head_dim * 2 * 4


def new_cache(blocks: int) -> tuple[PrefixCache, KvCache]:
    kv = KvCache(CONFIG, 3, CONTEXT)
    return PrefixCache(kv, blocks * BLOCK_BYTES), kv


def ids(kind: int, blocks: int = 1) -> list[int]:
    return [kind] * BLOCK * blocks


def keep(cache: PrefixCache, tokens: list[int], salt: str = "") -> None:
    """As a prompt of these tokens would."""
    path = cache.find(salt, tokens, len(tokens) - 2)
    cache.release(cache.extend(path, tokens, 0))
    cache.check([])


def found(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """Tokens that are there, without a trace of having looked but for the tick."""
    path = cache.find(salt, tokens, len(tokens))
    cache.release(path)
    return path.tokens


def test_what_was_kept_comes_back_to_another_slot() -> None:
    cache, kv = new_cache(4)
    kv.array[:, 0] = np.random.default_rng(0).normal(size=kv.array[:, 0].shape)
    keep(cache, ids(7, 3))
    path = cache.find("", ids(7, 3), 2 * BLOCK + 5)
    cache.load(path, 2)
    assert path.tokens == 2 * BLOCK + 5
    np.testing.assert_array_equal(
        kv.array[:, 2, :, : path.tokens], kv.array[:, 0, :, : path.tokens]
    )
    assert not kv.array[:, 2, :, path.tokens :].any()  # no more than it said


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        (BLOCK - 1, BLOCK - 1, 0),  # half blocks are not kept
        (BLOCK, BLOCK, BLOCK),
        (BLOCK, BLOCK - 2, BLOCK - 2),  # but a part of one may be used
        (2 * BLOCK, BLOCK, BLOCK),
        (2 * BLOCK, BLOCK + 1, BLOCK + 1),
        (2 * BLOCK, 0, 0),
        (2 * BLOCK, -1, 0),  # a prompt of one token
    ],
)
def test_at_most_so_many_tokens_are_found(tokens: int, most: int, expected: int) -> None:
    cache, _ = new_cache(8)
    keep(cache, ids(7, 3))
    path = cache.find("", ids(7, 3)[:tokens], most)
    assert path.tokens == expected
    assert len(path.nodes) == -(-expected // BLOCK)
    assert cache.counts.hit_tokens == expected


def test_prompts_part_where_they_differ() -> None:
    """A token that differs within a block makes the whole block another one."""
    cache, _ = new_cache(8)
    keep(cache, ids(1) + ids(2))
    keep(cache, ids(1) + ids(3))
    assert cache.blocks == 3  # the first is shared
    assert found(cache, ids(1) + ids(3) + ids(4)) == 2 * BLOCK
    assert found(cache, ids(1) + [2] * (BLOCK - 1) + [3]) == BLOCK
    assert found(cache, ids(2)) == 0  # only from the beginning


def test_salts_share_nothing_and_find_their_own() -> None:
    cache, _ = new_cache(8)
    for salt in ("", "a", "b"):
        assert found(cache, ids(7), salt) == 0
        keep(cache, ids(7), salt)
        assert found(cache, ids(7), salt) == BLOCK
    assert cache.blocks == 3
    assert found(cache, ids(7), "c") == 0


def test_the_least_recently_used_goes_first() -> None:
    cache, _ = new_cache(3)
    for kind in (1, 2, 3):
        keep(cache, ids(kind))
    found(cache, ids(1))  # used again
    keep(cache, ids(4))
    assert [kind for kind in (1, 2, 3, 4) if found(cache, ids(kind))] == [1, 3, 4]
    assert cache.counts.evicted_blocks == 1


def test_a_leaf_goes_before_what_it_hangs_on() -> None:
    """A block whose beginning is gone could never be found, and never be freed."""
    cache, _ = new_cache(3)
    keep(cache, ids(1) + ids(2) + ids(3))
    keep(cache, ids(9))
    assert found(cache, ids(1) + ids(2) + ids(3)) == 2 * BLOCK
    keep(cache, ids(8, 2))  # of 9 and 2, the least recently used is 9
    assert found(cache, ids(9)) == 0
    assert found(cache, ids(1)) == BLOCK


@pytest.mark.parametrize("held_tokens", [BLOCK, 2 * BLOCK - 3])
def test_a_held_path_is_never_evicted(held_tokens: int) -> None:
    """Its KV is about to be read into a slot; somebody else's in its place would be an answer
    from another prompt."""
    cache, _ = new_cache(3)
    keep(cache, ids(1, 2))
    path = cache.find("", ids(1, 2), held_tokens)
    for kind in range(2, 9):
        keep_beside(cache, ids(kind, 2), [path])
    assert found(cache, ids(1, 2)) >= held_tokens // BLOCK * BLOCK
    for node in path.nodes:
        assert node.parent is not None
    cache.clear()
    cache.check([path])
    assert cache.blocks == len(path.nodes)
    cache.release(path)
    cache.clear()
    assert cache.blocks == 0
    cache.check([])


def keep_beside(cache: PrefixCache, tokens: list[int], held: list[Path]) -> None:
    path = cache.find("", tokens, len(tokens) - 2)
    path = cache.extend(path, tokens, 0)
    cache.check([*held, path])
    cache.release(path)


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    """Making room for its own last blocks must not take its first."""
    cache, _ = new_cache(3)
    keep(cache, ids(1, 5))
    assert found(cache, ids(1, 5)) == 3 * BLOCK
    keep(cache, ids(2, 5))
    assert found(cache, ids(2, 5)) == 3 * BLOCK
    assert found(cache, ids(1, 5)) == 0


def test_a_cache_of_held_blocks_keeps_nothing_new_and_goes_on() -> None:
    cache, _ = new_cache(2)
    keep(cache, ids(1, 2))
    path = cache.find("", ids(1, 2), 2 * BLOCK)
    keep_beside(cache, ids(2, 2), [path])
    assert found(cache, ids(2, 2)) == 0
    cache.release(path)
    keep(cache, ids(2, 2))
    assert found(cache, ids(2, 2)) == 2 * BLOCK


def test_a_root_that_was_emptied_while_held_is_found_again() -> None:
    """A tenant whose last block made room for its own next one starts anew in the same tree."""
    cache, _ = new_cache(1)
    first = cache.find("a", ids(1), BLOCK)
    second = cache.find("a", ids(2), BLOCK)
    cache.release(cache.extend(first, ids(1), 0))
    second = cache.extend(second, ids(2), 0)
    cache.check([second])
    assert found(cache, ids(2), "a") == BLOCK
    cache.release(second)
    keep(cache, ids(3), "b")
    assert found(cache, ids(2), "a") == 0
    assert list(cache._roots) == ["b"]  # a tenant that has gone leaves nothing


def test_using_the_same_prefix_for_ever_takes_no_memory() -> None:
    """A system prompt is found with every request, and often nothing has to make room."""
    cache, _ = new_cache(64)
    for use in range(2000):
        keep(cache, ids(1, 2) + ids(2 + use % 3))
    assert len(cache._evictable) <= 200
    cache.clear()
    assert cache.blocks == 0
