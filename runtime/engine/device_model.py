"""Runs the decode and prefill sessions over a KV cache that lies on a device.

Only ids and lengths go in, and logits stay where they are made. One model decodes all slots in a
call, the other one slot after the other; both read prompts one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.graphs import contract as c
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine.device import Device, run_bound
from ortolan.runtime.engine.device_kv import ApartKvCache, BatchKvCache, KvValues
from ortolan.runtime.engine.device_logits import LOGITS_DTYPE, DeviceLogits, Logits, on_host
from ortolan.runtime.engine.seams import KvSeam
from ortolan.runtime.engine.sessions import SessionSet

Inputs = dict[str, npt.NDArray[np.generic]]
PrefillCall = Callable[[Inputs], ort.OrtValue]  # binds, runs, gives logits [1, n, vocab]


Cache = TypeVar("Cache", bound=KvSeam)


@dataclass
class _Bound:
    """A session's binding, and which values of the KV cache it has."""

    session: ort.InferenceSession
    io: ort.IOBinding = field(init=False)
    generation: int = -1

    def __post_init__(self) -> None:
        self.io = self.session.io_binding()

    def run(self, device: Device, values: KvValues, inputs: Inputs) -> None:
        """Run over these values of the cache, which are bound once and after they changed."""
        if self.generation != values.generation:
            values.bind(self.io)
            self.generation = values.generation
        for name, array in inputs.items():
            device.bind_input(self.io, name, array)
        run_bound(self.session, self.io, device.run_options())
        values.ran()

    def logits(self) -> ort.OrtValue:
        """Of the last run, until the next one: up to 1.27 it is the binding's own value.

        Outputs come in the order of binding; logits are bound first.
        """
        value: ort.OrtValue = self.io.get_outputs()[0]
        return value


class DeviceModel(ABC, Generic[Cache]):
    """What both have in common: how a prompt is read; see engine/model.py for the calls.

    most_prefill_tokens: most tokens of one call that the provider gets right; None: any number.
    """

    row_multiple = 1  # that a row left over differs is a property of the CPU's kernels
    ragged = False

    def __init__(
        self,
        config: ModelConfig,
        sessions: SessionSet,
        device: Device,
        cache: Cache,
    ) -> None:
        self.config = config
        self.cache = cache
        self.sessions = sessions
        self.device = device
        self.most_prefill_tokens = device.provider.capabilities.most_prefill_tokens

    @abstractmethod
    def decode(self, first: int, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Logits [rows, vocab] after one token for each slot from `first` on."""

    @abstractmethod
    def prefill(
        self,
        first: int,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_index: Sequence[Sequence[int]],
    ) -> Logits:
        """Read a chunk of tokens into slot `first`; logits [1, n, vocab]."""

    def read(
        self, call: PrefillCall, ids: Sequence[int], length: int, wanted: Sequence[int]
    ) -> Logits:
        """Read a piece of a prompt, in as many calls as the provider gets right.

        length: tokens that the slot holds before. Logits [1, n, vocab] at the `wanted` places; of
        several calls, which only scoring asks for, on the host.
        """
        most = self.most_prefill_tokens or len(ids)
        found: list[Logits] = []
        for start in range(0, len(ids), most):
            piece = ids[start : start + most]
            here = [place - start for place in wanted if start <= place < start + len(piece)]
            before = np.array([length + start], np.int32)
            inputs = call_inputs(np.array([piece], np.int64), before)
            inputs[c.LOGITS_INDEX] = np.array([here or [len(piece) - 1]], np.int32)
            logits = call(inputs)
            if here:
                places = np.arange(len(here), dtype=np.int64)[None]
                found.append(DeviceLogits(self.device, [logits], places))
                if len(here) < len(wanted):  # the next call puts its own in their place
                    found[-1] = on_host(found[-1])
        if len(found) == 1:
            return found[0]
        return np.concatenate([on_host(logits) for logits in found], axis=1)

    def read_into(self, values: KvValues, bound: _Bound, inputs: Inputs) -> ort.OrtValue:
        """One call of prefill over values of one slot; its logits."""
        self.device.bind_new_output(bound.io, c.LOGITS)
        bound.run(self.device, values, inputs)
        return bound.logits()

    def only(self, token_ids: Sequence[Sequence[int]]) -> Sequence[int]:
        """The ids of the one row that there is. Raises EngineError for several."""
        if len(token_ids) != 1:
            raise EngineError(f"provider {self.device.provider.name} reads one prompt at a time")
        return token_ids[0]


def call_inputs(ids: npt.NDArray[np.int64], before: npt.NDArray[np.int32]) -> Inputs:
    """Ids [rows, n] and the lengths that the contract wants. before: tokens that rows hold."""
    last = before + np.int32(ids.shape[1] - 1)
    return {
        c.INPUT_IDS: ids,
        c.SEQLENS_K: last,
        c.TOTAL_SEQUENCE_LENGTH: np.array(last.max() + 1, np.int32),
    }


class BatchDeviceModel(DeviceModel[BatchKvCache]):
    """Decodes all slots in one call, since a part of them cannot be bound."""

    def __init__(
        self,
        config: ModelConfig,
        sessions: SessionSet,
        device: Device,
        cache: BatchKvCache,
    ) -> None:
        super().__init__(config, sessions, device, cache)
        self._prefill = _Bound(sessions.prefill)
        self._decode = _Bound(sessions.decode)
        self._logits = device.zeros(LOGITS_DTYPE, [cache.slots, 1, config.vocab_size])
        self._decode.io.bind_ortvalue_output(c.LOGITS, self._logits)

    def decode(self, first: int, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Logits [rows, vocab] after one token for each slot from `first` on."""
        cache, rows = self.cache, len(token_ids)
        cache.settle()
        ids = np.zeros((cache.slots, 1), np.int64)
        ids[first : first + rows, 0] = token_ids
        # Slots outside of the call run as well, and write where their next token will be.
        before = np.minimum(np.array(cache.held, np.int32), np.int32(cache.capacity - 1))
        before[first : first + rows] = lengths
        self._decode.run(self.device, cache.all, call_inputs(ids, before))
        cache.held[first : first + rows] = [length + 1 for length in lengths]
        places = np.arange(first, first + rows, dtype=np.int64)
        return DeviceLogits(self.device, [self._logits], places)

    def prefill(
        self,
        first: int,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_index: Sequence[Sequence[int]],
    ) -> Logits:
        """Read a chunk of tokens into slot `first`; logits [1, n, vocab]."""
        ids = self.only(token_ids)
        self.cache.bring(first, lengths[0])
        call = partial(self.read_into, self.cache.stage, self._prefill)
        logits = self.read(call, ids, lengths[0], logits_index[0])
        self.cache.held[first] = lengths[0] + len(ids)
        return logits


class ApartDeviceModel(DeviceModel[ApartKvCache]):
    """Decodes one slot after the other, where rows of one call must be equally long."""

    def __init__(
        self,
        config: ModelConfig,
        sessions: SessionSet,
        device: Device,
        cache: ApartKvCache,
    ) -> None:
        super().__init__(config, sessions, device, cache)
        self._prefill = [_Bound(sessions.prefill) for _ in range(cache.slots)]
        self._decode = [_Bound(sessions.decode) for _ in range(cache.slots)]
        self._logits = [device.zeros(LOGITS_DTYPE, [1, 1, config.vocab_size]) for _ in self._decode]
        for bound, logits in zip(self._decode, self._logits, strict=True):
            bound.io.bind_ortvalue_output(c.LOGITS, logits)

    def decode(self, first: int, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Logits [rows, vocab] after one token for each slot from `first` on."""
        for place, (token_id, length) in enumerate(zip(token_ids, lengths, strict=True)):
            inputs = call_inputs(np.array([[token_id]], np.int64), np.array([length], np.int32))
            slot = first + place
            self._decode[slot].run(self.device, self.cache.each[slot], inputs)
        places = np.arange(first, first + len(token_ids), dtype=np.int64)
        return DeviceLogits(self.device, self._logits, places)

    def prefill(
        self,
        first: int,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_index: Sequence[Sequence[int]],
    ) -> Logits:
        """Read a chunk of tokens into slot `first`; logits [1, n, vocab]."""
        call = partial(self.read_into, self.cache.each[first], self._prefill[first])
        return self.read(call, self.only(token_ids), lengths[0], logits_index[0])
