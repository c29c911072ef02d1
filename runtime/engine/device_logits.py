"""Logits that stay on the device, and are indexed as numpy's would be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ortolan.runtime.engine import tiny_graphs
from ortolan.runtime.engine.device import Device

FloatArray = npt.NDArray[np.float32]

LOGITS_DTYPE = "float32"  # whatever a bundle computes in (graphs/contract.py)


class DeviceLogits:
    """Logits [..., vocab] as places in values [batch, n, vocab] on the device, all of one shape.

    Indexing chooses places and moves nothing; `picked` gathers the chosen ones there, `numpy`
    copies them to the host. Holds until the model's next call.
    places: positions of all rows of all values, one after another.
    """

    def __init__(
        self,
        device: Device,
        values: Sequence[ort.OrtValue],
        places: npt.NDArray[np.int64],
    ) -> None:
        self._device = device
        self._values = values
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, key: Any) -> DeviceLogits:
        return DeviceLogits(self._device, self._values, self._places[key])

    def picked(self) -> list[ort.OrtValue]:
        """float32 [m, vocab] on the device, one or more that together are this, row after row."""
        batch, n, vocab_size = self._values[0].shape()
        graph = tiny_graphs.pick_graph(vocab_size)
        which, within = np.divmod(self._places.reshape(-1), batch * n)
        # Neighbours from one value come by one run.
        borders = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(which)]
        found = []
        for start, end in pairwise(borders):
            index = np.ascontiguousarray(within[start:end])
            logits = self._values[which[start]]
            found += self._device.run(graph, {"logits": logits, "index": index}, [None])
        return found

    def numpy(self) -> FloatArray:
        """float32 [..., vocab] in host memory."""
        rows = np.concatenate([self._device.to_host(value) for value in self.picked()])
        return rows.reshape(*self._places.shape, -1)


Logits = FloatArray | DeviceLogits


def on_host(logits: Logits) -> FloatArray:
    """The logits as an array, copied if they lie elsewhere."""
    return logits if isinstance(logits, np.ndarray) else logits.numpy()
