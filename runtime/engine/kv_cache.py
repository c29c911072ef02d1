"""The KV cache: one array for all layers and slots, whose memory follows the tokens in it."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import numpy.typing as npt

from ortolan.errors import EngineError
from ortolan.graphs.manifest import ModelConfig

_FLOAT_BYTES = 4


class KvCache:
    """Keys and values [layers * 2, slots, kv_heads, capacity, head_dim] float32 in host memory.

    Even rows are keys, odd rows values. The array is an anonymous mapping: only pages that were
    written to take physical memory, and a released slot gives its pages back.
    """

    def __init__(self, config: ModelConfig, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        shape = (config.num_layers * 2, slots, config.num_kv_heads, capacity, config.head_dim)
        size = int(np.prod(shape)) * _FLOAT_BYTES
        try:
            self._memory = _anonymous(size)
        except (OSError, OverflowError, ValueError) as exc:
            raise EngineError(
                f"cannot map {size / 2**30:.1f} GiB for {slots} slots of {capacity} tokens "
                f"({exc}); "
                "lower max_slots or max_context"
            ) from exc
        self._array = np.frombuffer(self._memory, dtype=np.float32).reshape(shape)
        self._free = list(range(slots))

    def rows(self, layer: int, part: int, first: int, count: int) -> npt.NDArray[np.float32]:
        """Slots first to first + count of a layer's keys (part 0) or values (part 1), in place."""
        rows: npt.NDArray[np.float32] = self._array[layer * 2 + part, first : first + count]
        return rows

    def free_slots(self) -> list[int]:
        """Slots that nothing holds, lowest first."""
        return sorted(self._free)

    def acquire(self, slot: int) -> None:
        """Take a free slot."""
        self._free.remove(slot)

    def release(self, slot: int, *, keep: int = 0) -> None:
        """Give a slot back; pages past its first `keep` tokens return to the system."""
        assert slot not in self._free
        self._free.append(slot)
        if not hasattr(self._memory, "madvise") or not hasattr(mmap, "MADV_DONTNEED"):
            return
        head_bytes = self._array.strides[2]
        skip = keep * self._array.strides[3]
        heads = self._array.shape[2]
        for row in range(self._array.shape[0]):
            start = row * self._array.strides[0] + slot * self._array.strides[1]
            for head in range(heads):
                first = start + head * head_bytes + skip
                self._discard(first, start + (head + 1) * head_bytes)

    def _discard(self, start: int, end: int) -> None:
        page = mmap.PAGESIZE
        start, end = -(-start // page) * page, end // page * page
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def _anonymous(size: int) -> mmap.mmap:
    """A private mapping of zeros. A shared one would keep the pages that it is told to discard."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where a mapping without a file is paged in
        return mmap.mmap(-1, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        # Most of the mapping is never touched, and must not count as if it were.
        flags |= getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
    return mmap.mmap(-1, size, flags=flags)
