"""A device that can bind parts of its memory: rows of the KV cache by their addresses.

Decode then runs as many rows as there are, and every row stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnxruntime as ort

from ortolan.graphs import contract as c
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine import tiny_graphs
from ortolan.runtime.engine.device import Device, run_bound
from ortolan.runtime.engine.device_kv import KvForm
from ortolan.runtime.engine.device_logits import LOGITS_DTYPE, DeviceLogits, Logits
from ortolan.runtime.engine.device_model import DeviceModel, Inputs, call_inputs
from ortolan.runtime.engine.sessions import SessionSet


class SlicedKvCache:
    """All slots in one value per layer and part, of which any neighbours can be bound.

    held: tokens of each slot; where a row that only fills up a batch writes, so that nothing is
    lost.
    """

    def __init__(self, device: Device, form: KvForm, slots: int) -> None:
        self.slots = slots
        self.capacity = form.capacity
        self.held = [0] * slots
        self._device = device
        self._form = form
        self._values = [device.zeros(form.dtype, form.shape(slots)) for _ in form.names]
        self._slot_bytes = int(np.prod(form.shape(1))) * tiny_graphs.BYTES[form.dtype]

    def bind(self, io: ort.IOBinding, first: int, rows: int) -> None:
        """Bind `rows` slots from `first` on as past and present, in place."""
        shape = self._form.shape(rows)
        for (past_name, present_name), value in zip(self._form.names, self._values, strict=True):
            address = value.data_ptr() + first * self._slot_bytes
            self._device.bind_address(io.bind_input, past_name, self._form.dtype, shape, address)
            self._device.bind_address(
                io.bind_output, present_name, self._form.dtype, shape, address
            )

    def copy(self, source: int, target: int, tokens: int) -> None:
        """One slot to another."""
        session = self._device.session(tiny_graphs.take_graph(self._form.dtype))
        index, shape = np.array([source], np.int64), self._form.shape(1)
        for value in self._values:
            io = session.io_binding()
            io.bind_ortvalue_input("slots", value)
            self._device.bind_input(io, "index", index)
            address = value.data_ptr() + target * self._slot_bytes
            self._device.bind_address(io.bind_output, "row", self._form.dtype, shape, address)
            run_bound(session, io)
        self.held[target] = tokens

    def discard(self, slot: int, tokens: int, start: int = 0) -> None:
        """A device keeps its memory; what a free slot holds is written over."""


class _Decode:
    """A decode call over so many rows from a slot on, bound once.

    Where calls are recorded, every input lies at an address of its own, and the largest length is
    the capacity: the recording keeps it.
    """

    def __init__(self, model: SlicedDeviceModel, first: int, rows: int) -> None:
        self._device = model.device
        self._session = model.sessions.decode
        self._io = io = self._session.io_binding()
        self._captures = model.device.provider.captures
        model.cache.bind(io, first, rows)
        self.logits = model.device.zeros(LOGITS_DTYPE, [rows, 1, model.config.vocab_size])
        io.bind_ortvalue_output(c.LOGITS, self.logits)
        self._fixed: dict[str, ort.OrtValue] = {}
        self._options = model.device.run_options(rows)
        if self._captures:
            arrays = call_inputs(np.zeros((rows, 1), np.int64), np.zeros(rows, np.int32))
            arrays[c.TOTAL_SEQUENCE_LENGTH] = np.array(model.cache.capacity, np.int32)
            io.bind_cpu_input(c.TOTAL_SEQUENCE_LENGTH, arrays.pop(c.TOTAL_SEQUENCE_LENGTH))
            for name, array in arrays.items():
                self._fixed[name] = value = model.device.value_of(array)
                io.bind_ortvalue_input(name, value)

    def run(self, inputs: Inputs) -> None:
        """Decode, into `logits`."""
        for name, array in inputs.items():
            if not self._captures:
                self._device.bind_input(self._io, name, array)
            elif name in self._fixed:
                self._device.write(self._fixed[name], array)
        run_bound(self._session, self._io, self._options)


class SlicedDeviceModel(DeviceModel[SlicedKvCache]):
    """Decodes the rows that there are, or a few more where calls are recorded."""

    def __init__(
        self,
        config: ModelConfig,
        sessions: SessionSet,
        device: Device,
        cache: SlicedKvCache,
    ) -> None:
        super().__init__(config, sessions, device, cache)
        self._decode: dict[tuple[int, int], _Decode] = {}
        self._prefill: dict[int, ort.IOBinding] = {}

    def decode(self, first: int, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Logits [rows, vocab] after one token for each slot from `first` on."""
        cache, rows = self.cache, len(token_ids)
        first_bound, batch = self._batch(first, rows)
        bound = self._decode.get((first_bound, batch))
        if bound is None:
            bound = self._decode[first_bound, batch] = _Decode(self, first_bound, batch)
        start = first - first_bound
        ids = np.zeros((batch, 1), np.int64)
        ids[start : start + rows, 0] = token_ids
        held = np.array(cache.held[first_bound : first_bound + batch], np.int32)
        before = np.minimum(held, np.int32(cache.capacity - 1))
        before[start : start + rows] = lengths
        bound.run(call_inputs(ids, before))
        cache.held[first : first + rows] = [length + 1 for length in lengths]
        places = np.arange(start, start + rows, dtype=np.int64)
        return DeviceLogits(self.device, [bound.logits], places)

    def _batch(self, first: int, rows: int) -> tuple[int, int]:
        """The slots that a call covers: where calls are recorded, from 0 on, a power of two."""
        if not self.device.provider.captures:
            return first, rows
        return 0, min(1 << (first + rows - 1).bit_length(), self.cache.slots)

    def prefill(
        self,
        first: int,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_index: Sequence[Sequence[int]],
    ) -> Logits:
        """Read a chunk of tokens into slot `first`; logits [1, n, vocab]."""
        ids = self.only(token_ids)
        io = self._prefill.get(first)
        if io is None:
            io = self._prefill[first] = self.sessions.prefill.io_binding()
            self.device.bind_new_output(io, c.LOGITS)  # first, which is where it is looked for
            self.cache.bind(io, first, 1)
        logits = self.read(partial(self._call, io), ids, lengths[0], logits_index[0])
        self.cache.held[first] = lengths[0] + len(ids)
        return logits

    def _call(self, io: ort.IOBinding, inputs: Inputs) -> ort.OrtValue:
        for name, array in inputs.items():
            self.device.bind_input(io, name, array)
        self.device.bind_new_output(io, c.LOGITS)
        run_bound(self.sessions.prefill, io)
        logits: ort.OrtValue = io.get_outputs()[0]  # in the order of binding
        return logits
