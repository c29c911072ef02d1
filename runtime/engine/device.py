"""A provider's own memory: getting some, filling small inputs, and counting what crosses over.

Values there are OrtValues. Python cannot allocate or read most of them itself, so a graph of one
node does it, run by the provider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.runtime.engine import tiny_graphs
from ortolan.runtime.engine.sessions import open_tiny_graph
from ortolan.runtime.providers import Provider


@dataclass
class Crossings:
    """Bytes that went from the host to the device and back, since the engine was opened."""

    to_device: int = 0
    to_host: int = 0


class Device:
    """The memory of a provider, and the graphs that work on it.

    Not safe for use from several threads at once.
    """

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.crossings = Crossings()
        self._sessions: dict[bytes, ort.InferenceSession] = {}

    def zeros(self, dtype: str, shape: Sequence[int]) -> ort.OrtValue:
        """New memory on the device. Raises EngineError where there is not enough."""
        sizes = np.array(shape, np.int64)
        try:
            (value,) = self.run(
                tiny_graphs.zeros_graph(dtype, len(shape)), {"shape": sizes}, [None]
            )
        except EngineError as exc:
            raise EngineError(
                f"provider {self.provider.name} cannot hold {dtype} {list(shape)} in its memory: "
                f"{exc}; lower max_slots or max_context"
            ) from exc
        return value

    def run(
        self,
        graph: bytes,
        inputs: dict[str, npt.NDArray[Any] | ort.OrtValue],
        outputs: Sequence[ort.OrtValue | None],
    ) -> list[ort.OrtValue]:
        """Run a tiny graph; None among `outputs` asks for new memory on the device."""
        session = self.session(graph)
        io = session.io_binding()
        for name, value in inputs.items():
            self.bind_input(io, name, value)
        for spec, target in zip(session.get_outputs(), outputs, strict=True):
            if target is None:
                self.bind_new_output(io, spec.name)
            else:
                io.bind_ortvalue_output(spec.name, target)
        run_bound(session, io)
        values: list[ort.OrtValue] = io.get_outputs()
        return values

    def session(self, graph: bytes) -> ort.InferenceSession:
        """Of a tiny graph; made once."""
        session = self._sessions.get(graph)
        if session is None:
            session = self._sessions[graph] = open_tiny_graph(graph, self.provider)
        return session

    def bind_address(
        self,
        bind: Callable[..., None],
        name: str,
        dtype: str,
        shape: Sequence[int],
        address: int,
    ) -> None:
        """Bind a part of the device's memory, by `bind_input` or `bind_output` of a binding."""
        provider = self.provider
        kind = tiny_graphs.DTYPES[dtype]
        bind(name, provider.device, provider.device_id, kind, list(shape), address)

    def value_of(self, array: npt.NDArray[Any]) -> ort.OrtValue:
        """The array in memory of the device, at an address that stays."""
        provider = self.provider
        self.crossings.to_device += array.nbytes
        value: ort.OrtValue = ort.OrtValue.ortvalue_from_numpy(
            array, provider.device, provider.device_id
        )
        return value

    def write(self, value: ort.OrtValue, array: npt.NDArray[Any]) -> None:
        """Replace the content of a value of the device, of the same shape and type."""
        self.crossings.to_device += array.nbytes
        value.update_inplace(array)

    def bind_input(
        self, io: ort.IOBinding, name: str, value: npt.NDArray[Any] | ort.OrtValue
    ) -> None:
        """Bind a value of the device, or an array, which is copied there now."""
        if isinstance(value, np.ndarray):
            self.crossings.to_device += value.nbytes
            io.bind_cpu_input(name, value)
        else:
            io.bind_ortvalue_input(name, value)

    def bind_new_output(self, io: ort.IOBinding, name: str) -> None:
        """Bind an output to memory that ONNX Runtime gets on the device when it runs."""
        io.bind_output(name, self.provider.device, self.provider.device_id)

    def run_options(self, rows: int | None = None) -> ort.RunOptions | None:
        """Of a call on the provider; rows: of decode calls whose buffers never change."""
        entries = self.provider.run_config(rows)
        if not entries:
            return None
        options = ort.RunOptions()
        for name, value in entries.items():
            options.add_run_config_entry(name, value)
        return options

    def to_host(self, value: ort.OrtValue) -> npt.NDArray[Any]:
        """A copy in host memory."""
        array: npt.NDArray[Any] = value.numpy()
        self.crossings.to_host += array.nbytes
        return array


def run_bound(
    session: ort.InferenceSession, io: ort.IOBinding, options: ort.RunOptions | None = None
) -> None:
    """Run with everything bound. Raises EngineError."""
    try:
        session.run_with_iobinding(io, options)
    except Exception as exc:
        raise EngineError(f"a step failed in onnxruntime: {exc}") from exc
