"""How fast this machine reads memory, and how much of that a decode step uses."""

from __future__ import annotations

import threading
import time

import numpy as np

from ortolan import Manifest

_BYTES = 128 << 20  # for each thread: more than any cache here holds
_TRIES = 4


def read_bandwidth(threads: int) -> float:
    """Bytes per second that so many threads read together: the best of some tries.

    numpy's maximum of float32 reads as fast as anything tried from Python, and drops the GIL.
    """
    arrays = [np.ones(_BYTES // 4, np.float32) for _ in range(threads)]
    times = []
    for _ in range(_TRIES):
        readers = [threading.Thread(target=array.max) for array in arrays]
        began_s = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        times.append(time.perf_counter() - began_s)
    return threads * _BYTES / min(times)


def bytes_per_token(manifest: Manifest) -> int:
    """Bytes of weights that a decode step of one row reads: all but tables only looked up."""
    unread = {"rotary"} if manifest.model.tie_embeddings else {"rotary", "embedding"}
    return sum(group.bytes for group in manifest.weights if group.role not in unread)
