"""The KV cache: one array for all layers and slots, whose memory follows the tokens in it."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.graphs.contract import KvDtype
from ortolan.graphs.manifest import ModelConfig

KvArray = npt.NDArray[Any]

# What an element of the cache is in numpy, which has no bfloat16: its bits are only moved here.
_NUMPY: Mapping[KvDtype, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
}
_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16


def element_bytes(dtype: KvDtype) -> int:
    """Bytes of one number in the cache."""
    return np.dtype(_NUMPY[dtype]).itemsize


def bytes_per_token(config: ModelConfig, dtype: KvDtype) -> int:
    """Bytes that keys and values of one token take over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * element_bytes(dtype)


def padded_capacity(context: int, head_dim: int, dtype: KvDtype = "float32") -> int:
    """Positions per slot for `context` tokens, so that attention's reads do not collide.

    A head's keys, capacity * head_dim numbers, take an odd number of memory pages. Were they a
    power of two apart, as 8,192 tokens make them, those of all rows and heads would compete for
    the same places in the processor's caches: attention of 16 rows then takes a seventh longer
    (docs/performance.md). Even, since padded chunks are.
    """
    step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, head_dim * element_bytes(dtype))
    step = max(step, 2)
    steps = -(-context // step)
    return (steps + 1 - steps % 2) * step


class KvCache:
    """Keys and values [layers * 2, slots, kv_heads, capacity, head_dim] in host memory.

    Even rows are keys, odd rows values. The array is an anonymous mapping: only pages that were
    written to take physical memory, and a slot that is given back returns its pages.
    dtype: of what it holds; bfloat16 is uint16 in `array`.
    """

    def __init__(
        self, config: ModelConfig, slots: int, capacity: int, dtype: KvDtype = "float32"
    ) -> None:
        self.dtype = dtype
        self.slots = slots
        self.capacity = capacity
        shape = (config.num_layers * 2, slots, config.num_kv_heads, capacity, config.head_dim)
        size = int(np.prod(shape)) * element_bytes(dtype)
        try:
            self._memory = anonymous_memory(size)
        except (OSError, OverflowError, ValueError) as exc:
            raise EngineError(
                f"cannot map {size / 2**30:.1f} GiB for {slots} slots of {capacity} tokens "
                f"({exc}); "
                "lower max_slots or max_context"
            ) from exc
        self.array: KvArray = np.frombuffer(self._memory, _NUMPY[dtype]).reshape(shape)

    def rows(self, layer: int, part: int, first: int, count: int) -> KvArray:
        """Slots first to first + count of a layer's keys (part 0) or values (part 1), in place."""
        rows: KvArray = self.array[layer * 2 + part, first : first + count]
        return rows

    def value(self, layer: int, part: int, first: int, count: int) -> ort.OrtValue:
        """The same as ONNX Runtime binds it: the cache's own memory, which must outlive it."""
        rows = self.rows(layer, part, first, count)
        if self.dtype == "bfloat16":
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(rows, _ONNX_BFLOAT16)
        return ort.OrtValue.ortvalue_from_numpy(rows)

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
