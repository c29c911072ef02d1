"""KV of earlier prompts, kept in blocks under the tokens that they begin with."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ortolan.runtime.engine.kv_cache import KvCache, anonymous_memory

BLOCK = 16  # tokens
_STALE_ENTRIES = 64  # of the heap, beside twice the blocks, before they are taken out


@dataclass(eq=False, slots=True)
class _Node:
    """A block of KV below the blocks before it. references: paths that are held through it."""

    parent: _Node | None
    tokens: tuple[int, ...]
    block: int  # into the pool
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    references: int = 0
    used: int = 0  # tick of the last use
    salt: str = ""  # of a root, which has no block


@dataclass(frozen=True)
class Path:
    """A held walk from a root: no node on it is evicted until it is released."""

    root: _Node
    nodes: tuple[_Node, ...]
    tokens: int  # how many of a prompt's tokens it covers


@dataclass
class PrefixCounts:
    """What happened since the start, in tokens of prompts and in blocks."""

    query_tokens: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0


class PrefixCache:
    """A radix tree over blocks of 16 tokens, with reference counts and a budget in bytes.

    Blocks are copies: a prompt's KV goes in as it is read, and comes out into another slot when
    a prompt begins alike. Only KV that prefill wrote may be stored (rule 1b). Trees of different
    salts share nothing. The least recently used leaf makes room for a new block.
    """

    def __init__(self, cache: KvCache, budget_bytes: int) -> None:
        self._cache = cache
        layers2, _, heads, _, head_dim = cache.array.shape
        shape = (layers2, heads, BLOCK, head_dim)
        block_bytes = int(np.prod(shape)) * cache.array.itemsize
        self.capacity = budget_bytes // block_bytes
        self._memory = anonymous_memory(max(self.capacity, 1) * block_bytes, huge_pages=True)
        self._pool = np.frombuffer(self._memory, cache.array.dtype)
        self._pool = self._pool.reshape(max(self.capacity, 1), *shape)
        self._free = list(range(self.capacity))[::-1]
        self._roots: dict[str, _Node] = {}
        self._ticks = count(1)
        self._order = count()
        self._evictable: list[tuple[int, int, _Node]] = []  # a heap; stale entries are skipped
        self.counts = PrefixCounts()

    @property
    def blocks(self) -> int:
        """Blocks in use."""
        return self.capacity - len(self._free)

    def find(self, salt: str, ids: Sequence[int], most: int) -> Path:
        """The longest stored beginning of `ids`, of at most `most` tokens, held."""
        node = root = self._roots.get(salt) or _Node(None, (), -1, salt=salt)
        nodes: list[_Node] = []
        while len(nodes) * BLOCK < most:
            start = len(nodes) * BLOCK
            child = node.children.get(tuple(ids[start : start + BLOCK]))
            if child is None:
                break
            nodes.append(child)
            node = child
        self.counts.query_tokens += len(ids)
        tokens = min(len(nodes) * BLOCK, max(most, 0))
        self.counts.hit_tokens += tokens
        return self._held(Path(root, tuple(nodes), tokens))

    def load(self, path: Path, slot: int) -> None:
        """Copy the path's KV to the start of a slot."""
        for index, node in enumerate(path.nodes):
            start = index * BLOCK
            size = min(BLOCK, path.tokens - start)
            self._cache.array[:, slot, :, start : start + size] = self._pool[
                node.block, :, :, :size
            ]

    def extend(self, path: Path, ids: Sequence[int], slot: int) -> Path:
        """Keep the full blocks of `ids`, a prompt's beginning that was read into `slot`.

        `path` is held and begins like `ids`; the path that takes its place is held, too. It ends
        early where nothing can make room.
        """
        if len(ids) // BLOCK <= len(path.nodes):
            return path
        self._roots[path.root.salt] = root = self._roots.get(path.root.salt) or path.root
        if not path.nodes:
            path = Path(root, (), path.tokens)  # another request of this salt may have made it
        nodes = list(path.nodes)
        node = nodes[-1] if nodes else root
        for start in range(len(nodes) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
            child = self._child(node, tuple(ids[start : start + BLOCK]), start, slot)
            if child is None:
                break
            # Held, so that making room for the next block does not evict this one.
            child.references += 1
            nodes.append(child)
            node = child
        if root.children:  # it may have been dropped when its last leaf made room
            self._roots[root.salt] = root
        else:
            self._roots.pop(root.salt, None)
        return Path(path.root, tuple(nodes), path.tokens)

    def _child(self, node: _Node, key: tuple[int, ...], start: int, slot: int) -> _Node | None:
        """The block of tokens `key` below a node, copied from the slot if it is not there yet."""
        child = node.children.get(key)
        if child is not None:
            return child
        block = self._take_block()
        if block is None:
            return None
        self._pool[block] = self._cache.array[:, slot, :, start : start + BLOCK]
        child = node.children[key] = _Node(node, key, block)
        self.counts.stored_blocks += 1
        return child

    def release(self, path: Path) -> None:
        """Let go of a path; its blocks may be evicted again."""
        self._release(path.nodes)

    def clear(self) -> None:
        """Forget everything that is not held."""
        while (block := self._evict()) is not None:
            self._free.append(block)

    def check(self, held: Iterable[Path]) -> None:
        """Our invariants: every block has one place, every reference one holder."""
        expected: dict[int, int] = {}
        for path in held:
            for node in path.nodes:
                expected[id(node)] = expected.get(id(node), 0) + 1
        blocks = list(self._free)
        for node in self._walk():
            blocks.append(node.block)
            assert node.references == expected.pop(id(node), 0), "a reference without a holder"
            assert node.parent is not None
            assert node.parent.children[node.tokens] is node
        assert not expected, "a held block is not in the tree"
        assert sorted(blocks) == list(range(self.capacity)), "a block is lost or used twice"

    def _walk(self) -> Iterator[_Node]:
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _held(self, path: Path) -> Path:
        for node in path.nodes:
            node.references += 1
        return path

    def _release(self, nodes: Sequence[_Node]) -> None:
        tick = next(self._ticks)
        for node in nodes:
            node.used = tick
            node.references -= 1
            self._offer(node)

    def _offer(self, node: _Node) -> None:
        if node.parent is not None and not node.references and not node.children:
            heapq.heappush(self._evictable, (node.used, next(self._order), node))
        # Every use leaves an entry, and where nothing has to make room, none would be taken out.
        if len(self._evictable) > 2 * self.blocks + _STALE_ENTRIES:
            self._evictable = [entry for entry in self._evictable if _current(*entry)]
            heapq.heapify(self._evictable)

    def _take_block(self) -> int | None:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> int | None:
        """The block of the least recently used leaf that nobody holds."""
        while self._evictable:
            entry = heapq.heappop(self._evictable)
            if not _current(*entry):
                continue
            node = entry[2]
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens]
            node.parent = None
            self.counts.evicted_blocks += 1
            self._offer(parent)
            if parent.parent is None and not parent.children:
                self._roots.pop(parent.salt, None)
            return node.block
        return None


def _current(used: int, order: int, node: _Node) -> bool:
    """Whether an entry of the heap is of a leaf that may go, and of its last use."""
    evicted = node.parent is None
    return not (evicted or node.references or node.children) and node.used == used
