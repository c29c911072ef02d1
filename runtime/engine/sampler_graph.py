"""A session of the sampling graph with its buffers: logits in, sorted candidates out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ortolan.errors import EngineError
from ortolan.runtime.engine.device import Device, run_bound
from ortolan.runtime.engine.sampler_choice import Candidates, joined
from ortolan.runtime.engine.sampler_row import FloatArray, IdArray, SamplerRow

# Bindings with more candidates are rare and large: made for one run, not kept.
_KEPT_CANDIDATES = 512
_LEAST_ADJUSTMENTS = 16


@dataclass
class _Bound(Candidates):
    """Candidates and the rest of the graph's buffers.

    Bound once per shape; runs after the first only write into the buffers.
    """

    adjustments: tuple[IdArray, FloatArray, FloatArray]  # ids, scale, bias [batch, m], in
    constants: tuple[IdArray, IdArray]  # num_valid, k [1], in
    io: ort.IOBinding
    source: FloatArray | ort.OrtValue | None = None  # the logits bound last

    @property
    def inputs(self) -> tuple[NDArray[np.generic], ...]:
        """All but the logits."""
        return (*self.adjustments, self.temperature, *self.constants)

    @property
    def outputs(self) -> tuple[NDArray[np.generic], ...]:
        return self.ids, self.logits, self.raw_logits, self.log_sum_exp


class SampleGraph:
    """Runs the sampling graph over a batch. A run's results hold until the next run."""

    def __init__(
        self, session: ort.InferenceSession, num_valid: int, device: Device | None = None
    ) -> None:
        vocab_size = session.get_inputs()[0].shape[1]
        if not 1 <= num_valid <= vocab_size:
            raise EngineError(
                f"the sampling graph has logits for {vocab_size} tokens, the tokenizer has "
                f"{num_valid} tokens, which must be from 1 to as many; export again"
            )
        self._session = session
        self._num_valid = num_valid
        # Other providers copy an input when it is bound, so that later writes go unseen.
        self._binds_by_reference = session.get_providers() == ["CPUExecutionProvider"]
        self._device = device
        self._bindings: dict[tuple[int, int, int], _Bound] = {}

    def run(
        self, logits: FloatArray | ort.OrtValue, rows: Sequence[SamplerRow], k: int
    ) -> Candidates:
        """The k likeliest tokens of each row of `logits` [batch, vocab], batch == len(rows)."""
        m = max(row.num_adjusted for row in rows)
        if m:
            m = max(_LEAST_ADJUSTMENTS, 1 << (m - 1).bit_length())
        key = len(rows), k, m
        found = self._bindings.get(key)
        if found is None:
            found = self._bind(len(rows), k, max(m, 1))
            if k <= _KEPT_CANDIDATES:
                self._bindings[key] = found
        found.temperature[:] = [row.temperature for row in rows]
        if m:
            ids, scale, bias = found.adjustments
            for place, row in enumerate(rows):
                row.fill(ids[place], scale[place], bias[place])
        if not self._binds_by_reference:
            _bind_inputs(found)
        if logits is not found.source or not self._binds_by_reference:
            _bind_logits(found, logits)
        run_bound(self._session, found.io)
        if self._device is not None:
            self._device.crossings.to_device += sum(array.nbytes for array in found.inputs)
            self._device.crossings.to_host += sum(array.nbytes for array in found.outputs)
        return found

    def run_all(
        self, values: Sequence[ort.OrtValue], rows: Sequence[SamplerRow], k: int
    ) -> Candidates:
        """The same over several values, whose rows follow one another."""
        if len(values) == 1:
            return self.run(values[0], rows, k)
        found, first = [], 0
        for value in values:
            end = first + value.shape()[0]
            # Copied: rows of one shape share their buffers.
            found.append(joined([self.run(value, rows[first:end], k)]))
            first = end
        return joined(found)

    def _bind(self, batch: int, k: int, m: int) -> _Bound:
        found = _Bound(
            ids=np.empty((batch, k), np.int64),
            logits=np.empty((batch, k), np.float32),
            raw_logits=np.empty((batch, k), np.float32),
            log_sum_exp=np.empty(batch, np.float32),
            temperature=np.ones(batch, np.float32),
            # As they are, these change nothing: all that rows without adjustments need.
            adjustments=(
                np.zeros((batch, m), np.int64),
                np.ones((batch, m), np.float32),
                np.zeros((batch, m), np.float32),
            ),
            constants=(np.array([self._num_valid], np.int64), np.array([k], np.int64)),
            io=self._session.io_binding(),
        )
        _bind_inputs(found)
        outputs: dict[str, NDArray[np.generic]] = {
            "candidate_ids": found.ids,
            "candidate_logits": found.logits,
            "candidate_raw_logits": found.raw_logits,
            "log_sum_exp": found.log_sum_exp,
        }
        for name, array in outputs.items():
            found.io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        return found


def _bind_inputs(found: _Bound) -> None:
    inputs: dict[str, NDArray[np.generic]] = {
        "adjust_ids": found.adjustments[0],
        "adjust_scale": found.adjustments[1],
        "adjust_bias": found.adjustments[2],
        "temperature": found.temperature,
        "num_valid": found.constants[0],
        "k": found.constants[1],
    }
    for name, array in inputs.items():
        found.io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))


def _bind_logits(found: _Bound, logits: FloatArray | ort.OrtValue) -> None:
    if isinstance(logits, np.ndarray):
        # `source` keeps the memory alive while it is bound.
        logits = found.source = np.ascontiguousarray(logits)
        logits = ort.OrtValue.ortvalue_from_numpy(logits)
    else:
        found.source = logits
    found.io.bind_ortvalue_input("logits", logits)
