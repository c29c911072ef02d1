"""The weights file: tensors one after another, each written once, hashed on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir

from ortolan.errors import CheckpointError
from ortolan.export.weights import Array
from ortolan.graphs.contract import FloatDtype
from ortolan.graphs.linear import ONNX_DTYPES
from ortolan.graphs.manifest import FileEntry

# A page, so that a mapped tensor starts on one; small tensors only keep their SIMD alignment.
_LARGE_ALIGNMENT = 4096
_SMALL_ALIGNMENT = 64
_LARGE = 64 * 1024
SLAB_BYTES = 16 << 20  # written at a time


def pack_int4(codes: Array) -> Array:
    """int8 values in -8..7, flattened, two to a byte with the first in the low half.

    Source: ONNX's raw data layout for 4-bit types.
    """
    flat = codes.reshape(-1).view(np.uint8)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed: Array = (flat[0::2] & 15) | (flat[1::2] << 4)
    return packed


def _rounded(name: str, slab: Array, dtype: ir.DataType) -> Array:
    with np.errstate(over="ignore"):
        rounded: Array = slab.astype(dtype.numpy())
    if not np.isfinite(rounded).all():
        largest = float(np.abs(slab).max())
        raise CheckpointError(
            f"{name}: {largest:g} is beyond what {dtype.name.lower()} holds; "
            "export with --dtype bfloat16 or float32"
        )
    return rounded


class WeightsFile:
    """Writes `path` and hands back references to what it wrote.

    Use as a context manager; `entry` holds size and hash after it closes.
    floats: the dtype in which float32 tensors are stored.
    """

    def __init__(self, path: Path, floats: FloatDtype = "float32") -> None:
        self.path = path
        self._floats = ONNX_DTYPES[floats]
        self.tensors: dict[str, ir.ExternalTensor] = {}
        self.entry = FileEntry(0, "")
        self._digest = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> WeightsFile:
        self._file = self.path.open("xb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self.entry = FileEntry(self._size, self._digest.hexdigest())

    def add(self, name: str, array: Array, dtype: ir.DataType, *, as_it_is: bool = False) -> int:
        """Write a tensor; int4 values come as int8 and are packed. Returns its bytes.

        as_it_is: float32 stays float32. Raises CheckpointError where `floats` cannot hold a number.
        """
        data = pack_int4(array) if dtype == ir.DataType.INT4 else array
        # A transposed matrix is laid out a slab at a time: large ones are not held twice.
        lines = np.atleast_1d(data)
        step = max(1, SLAB_BYTES * len(lines) // max(1, data.nbytes))
        slabs = (lines[start : start + step] for start in range(0, len(lines), step))
        return self.add_slabs(name, array.shape, dtype, data.nbytes, slabs, as_it_is=as_it_is)

    def add_slabs(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: ir.DataType,
        size: int,
        slabs: Iterable[Array],
        *,
        as_it_is: bool = False,
    ) -> int:
        """Write a tensor of `size` bytes that is made piece by piece. Returns its bytes."""
        if dtype == ir.DataType.FLOAT and dtype != self._floats and not as_it_is:
            slabs = (_rounded(name, slab, self._floats) for slab in slabs)
            dtype, size = self._floats, size // 2
        alignment = _LARGE_ALIGNMENT if size >= _LARGE else _SMALL_ALIGNMENT
        self._write(bytes(-self._size % alignment))
        offset = self._size
        for slab in slabs:
            self._write(np.ascontiguousarray(slab).reshape(-1).view(np.uint8).data)
        assert self._size - offset == size
        self.tensors[name] = self._reference(name, dtype, shape, offset, size)
        return size

    def add_view(
        self, name: str, of: str, shape: tuple[int, ...], dtype: ir.DataType | None = None
    ) -> None:
        """Another name and shape, and maybe dtype, for the bytes of a tensor already written."""
        whole = self.tensors[of]
        assert whole.offset is not None
        assert whole.length is not None
        self.tensors[name] = self._reference(
            name, dtype or whole.dtype, shape, whole.offset, whole.length
        )

    def _reference(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...], offset: int, length: int
    ) -> ir.ExternalTensor:
        return ir.ExternalTensor(
            self.path.name,
            offset,
            length,
            dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=self.path.parent,
        )

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)
