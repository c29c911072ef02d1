"""The KV cache in a provider's own memory, in two forms.

Most devices cannot bind a part of a value. So either all slots are one value per layer and part:
decode runs over all of them, a prompt is read in a `stage`, values of one slot, and goes into its
slot when decode needs it. Or, where one call cannot decode rows of different lengths, each slot
has values of its own. A graph of one node moves what has to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from ortolan.graphs import contract as c
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine import tiny_graphs
from ortolan.runtime.engine.device import Device

_NOBODY = -1


@dataclass(frozen=True)
class KvForm:
    """Keys and values [rows, kv_heads, capacity, head_dim] of a dtype, per layer and part.

    in_place: past and present are one value. Otherwise each has its own, and they change places
    after a run.
    """

    config: ModelConfig
    capacity: int
    dtype: str = "float32"
    in_place: bool = True

    @property
    def names(self) -> list[tuple[str, str]]:
        """Of past and present, in the order in which values are kept."""
        return [
            (c.past_name(layer, part), c.present_name(layer, part))
            for layer in range(self.config.num_layers)
            for part in c.PARTS
        ]

    def shape(self, rows: int) -> list[int]:
        """Of one value."""
        return [rows, self.config.num_kv_heads, self.capacity, self.config.head_dim]


class KvValues:
    """One value per layer and part, bound as past and present.

    generation: raised when values are replaced by others, after which they are bound again.
    """

    def __init__(self, device: Device, form: KvForm, rows: int) -> None:
        shape = form.shape(rows)
        self.values = [device.zeros(form.dtype, shape) for _ in form.names]
        self._next: list[ort.OrtValue] | None = None
        if not form.in_place:
            self._next = [device.zeros(form.dtype, shape) for _ in form.names]
        self.generation = 0
        self._names = form.names

    def bind(self, io: ort.IOBinding) -> None:
        """Bind them; `ran` is to be called after each run."""
        pairs = zip(self._names, self.values, self._next or self.values, strict=True)
        for (past_name, present_name), past, present in pairs:
            io.bind_ortvalue_input(past_name, past)
            io.bind_ortvalue_output(present_name, present)

    def ran(self) -> None:
        """Where past and present are apart, what was written is now what is read."""
        if self._next is not None:
            self.values, self._next = self._next, self.values
            self.generation += 1


class BatchKvCache:
    """All slots in one value per layer and part, and a stage of one slot for prompts.

    held: tokens of each slot; where one that does not take part in a decode call writes, so that
    nothing is lost.
    """

    def __init__(self, device: Device, form: KvForm, slots: int) -> None:
        self.slots = slots
        self.capacity = form.capacity
        self.held = [0] * slots
        self.all = KvValues(device, form, slots)
        self.stage = KvValues(device, form, 1)
        self._spare = device.zeros(form.dtype, form.shape(slots))
        self._device = device
        self._dtype = form.dtype
        self._staged = _NOBODY  # the slot whose prompt is in the stage
        self._stage_newer = False  # whether the slot has not got it yet

    def bring(self, slot: int, tokens: int) -> None:
        """Have a slot's first `tokens` in the stage, to be written there."""
        if self._staged != slot:
            self.settle()
            if tokens:
                self._take(slot)
        self._staged, self._stage_newer = slot, True

    def settle(self) -> None:
        """Have in the slots what was read in the stage; the stage is nobody's afterwards."""
        if self._stage_newer:
            self._put(self._staged)
        self._staged, self._stage_newer = _NOBODY, False

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` of one slot to another."""
        self.settle()
        self._take(source)
        self._put(target)
        self.held[target] = tokens

    def discard(self, slot: int, tokens: int, start: int = 0) -> None:
        """A device keeps its memory; what a free slot holds is written over."""

    def _take(self, slot: int) -> None:
        index = np.array([slot], np.int64)
        graph = tiny_graphs.take_graph(self._dtype)
        for value, row in zip(self.all.values, self.stage.values, strict=True):
            self._device.run(graph, {"slots": value, "index": index}, [row])

    def _put(self, slot: int) -> None:
        chosen = np.zeros((self.slots, 1, 1, 1), np.bool_)
        chosen[slot] = True
        graph = tiny_graphs.put_graph(self._dtype)
        # What is written must be another value; the one replaced is the next one's spare.
        for place, (value, row) in enumerate(zip(self.all.values, self.stage.values, strict=True)):
            inputs = {"slots": value, "row": row, "chosen": chosen}
            self._device.run(graph, inputs, [self._spare])
            self.all.values[place], self._spare = self._spare, value
        self.all.generation += 1


class ApartKvCache:
    """Values of its own for every slot."""

    def __init__(self, device: Device, form: KvForm, slots: int) -> None:
        self.slots = slots
        self.capacity = form.capacity
        self.each: Sequence[KvValues] = [KvValues(device, form, 1) for _ in range(slots)]
        self._device = device
        self._dtype = form.dtype

    def copy(self, source: int, target: int, tokens: int) -> None:
        """One slot to another."""
        index = np.zeros(1, np.int64)
        graph = tiny_graphs.take_graph(self._dtype)
        pairs = zip(self.each[source].values, self.each[target].values, strict=True)
        for value, row in pairs:
            self._device.run(graph, {"slots": value, "index": index}, [row])

    def discard(self, slot: int, tokens: int, start: int = 0) -> None:
        """A device keeps its memory; what a free slot holds is written over."""
