"""The KV cache: one array for all layers and slots, whose memory follows the tokens in it."""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.graphs.manifest import ModelConfig

_FLOAT_BYTES = 4


def bytes_per_token(config: ModelConfig) -> int:
    """Bytes that keys and values of one token take over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * _FLOAT_BYTES


def padded_capacity(context: int, head_dim: int) -> int:
    """Positions per slot for `context` tokens, so that attention's reads do not collide.

    A head's keys, capacity * head_dim * 4 bytes, take an odd number of memory pages. Were they a
    power of two apart, as 8,192 tokens make them, those of all rows and heads would compete for
    the same places in the processor's caches: attention of 16 rows then takes a seventh longer
    (docs/performance.md). Even, since padded chunks are.
    """
    step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, head_dim * _FLOAT_BYTES)
    step = max(step, 2)
    steps = -(-context // step)
    return (steps + 1 - steps % 2) * step


class KvCache:
    """Keys and values [layers * 2, slots, kv_heads, capacity, head_dim] float32 in host memory.

    Even rows are keys, odd rows values. The array is an anonymous mapping: only pages that were
    written to take physical memory, and a slot that is given back returns its pages.
    """

    def __init__(self, config: ModelConfig, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        shape = (config.num_layers * 2, slots, config.num_kv_heads, capacity, config.head_dim)
        size = int(np.prod(shape)) * _FLOAT_BYTES
        try:
            self._memory = anonymous_memory(size)
        except (OSError, OverflowError, ValueError) as exc:
            raise EngineError(
                f"cannot map {size / 2**30:.1f} GiB for {slots} slots of {capacity} tokens "
                f"({exc}); "
                "lower max_slots or max_context"
            ) from exc
        self.array: npt.NDArray[np.float32] = np.frombuffer(self._memory, np.float32).reshape(shape)

    def rows(self, layer: int, part: int, first: int, count: int) -> npt.NDArray[np.float32]:
        """Slots first to first + count of a layer's keys (part 0) or values (part 1), in place."""
        rows: npt.NDArray[np.float32] = self.array[layer * 2 + part, first : first + count]
        return rows

    def value(self, layer: int, part: int, first: int, count: int) -> ort.OrtValue:
        """The same as ONNX Runtime binds it: the cache's own memory, which must outlive it."""
        return ort.OrtValue.ortvalue_from_numpy(self.rows(layer, part, first, count))

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` of one slot to another."""
        self.array[:, target, :, :tokens] = self.array[:, source, :, :tokens]

    def discard(self, slot: int, tokens: int, start: int = 0) -> None:
        """Return the pages of a slot's tokens from `start` to `tokens` to the system.

        What they held is lost. Costs about 10 us per token in system calls and later page faults.
        """
        if not hasattr(self._memory, "madvise") or not hasattr(mmap, "MADV_DONTNEED"):
            return
        row_bytes, slot_bytes, head_bytes, token_bytes = self.array.strides[:4]
        for row in range(self.array.shape[0]):
            base = row * row_bytes + slot * slot_bytes
            for head in range(self.array.shape[2]):
                first = base + head * head_bytes
                end = first + tokens * token_bytes
                self._discard(first + start * token_bytes, end, first + head_bytes)

    def _discard(self, start: int, end: int, border: int) -> None:
        """Whole pages from start to end, and the one that end is in, if it is left of border."""
        page = mmap.PAGESIZE
        start = -(-start // page) * page
        end = min(-(-end // page) * page, border // page * page)
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def anonymous_memory(size: int, *, huge_pages: bool = False) -> mmap.mmap:
    """A private mapping of zeros. A shared one would keep the pages that it is told to discard.

    huge_pages: for what is written in large pieces, where most of the time goes into small pages.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where a mapping without a file is paged in
        return mmap.mmap(-1, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        # Most of the mapping is never touched, and must not count as if it were.
        flags |= getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
    memory = mmap.mmap(-1, size, flags=flags)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
