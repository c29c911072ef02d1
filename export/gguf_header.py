"""A GGUF file's header, held against the file's size before the gguf package reads it.

The package believes every count and length that it meets: one flipped bit in the length of an
array, and it collects empty arrays until memory ends. This walk keeps nothing, and its time and
memory are bounded by the file's real size.
Source of the layout: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path

import gguf
from gguf import GGUFValueType as ValueType

from ortolan.errors import CheckpointError, ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LONGEST_NAME = 65535
_MOST_ITEMS = 1 << 22  # of an array; the largest vocabularies have a sixteenth of that
_MOST_DIMS = 4
_SCALARS = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}


def check_header(path: Path) -> None:
    """Check that all that the header announces lies inside the file.

    Raises CheckpointError for a file that is no GGUF, damaged or cut short, and ConfigError for a
    version or byte order that is not read here.
    """
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
        if magic != _MAGIC:
            raise CheckpointError(
                f"{path}: not a GGUF file (it starts with {magic!r}, expected {_MAGIC!r}); "
                "give a .gguf file"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                end = _Walk(data, path).end_of_tensors()
            except ValueError as exc:
                raise CheckpointError(
                    f"{path}: the GGUF header is damaged or cut short ({exc}); fetch the file again"
                ) from None
            size = len(data)
    if end > size:
        raise CheckpointError(
            f"{path}: cut short: it has {size:,} bytes, its tensors need {end:,}; "
            "fetch the file again"
        )


class _Walk:
    """One pass over a header; raises ValueError where it does not hold together."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = len(_MAGIC)

    def end_of_tensors(self) -> int:
        """Where the last tensor's data ends, in bytes from the start of the file."""
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            found = "a big-endian file" if swapped in _VERSIONS else f"GGUF version {version}"
            raise ConfigError(
                f"{self._path}: is {found}; little-endian files of version 2 or 3 are read"
            )
        num_tensors, num_pairs = self._number("<Q"), self._number("<Q")
        alignment = gguf.GGUF_DEFAULT_ALIGNMENT
        for _ in range(num_pairs):
            key = self._name()
            kind = ValueType(self._number("<I"))
            if key == b"general.alignment" and kind == ValueType.UINT32:
                alignment = self._number("<I")
            else:
                self._skip_value(kind)
        ends = [self._tensor_end() for _ in range(num_tensors)]
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        return -(-self._at // alignment) * alignment + max(ends, default=0)

    def _number(self, layout: str) -> int:
        at = self._at
        self._skip(struct.calcsize(layout))
        number: int = struct.unpack_from(layout, self._data, at)[0]
        return number

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(
                f"{size:,} bytes are announced at {self._at:,}, the file has {len(self._data):,}"
            )
        self._at += size

    def _name(self) -> bytes:
        length, start = self._number("<Q"), self._at
        if not 0 < length <= _LONGEST_NAME:
            raise ValueError(f"a name of {length:,} bytes is announced at {start:,}")
        self._skip(length)
        name = self._data[start : self._at]
        if not name.decode().isprintable():  # messages show it on a terminal
            raise ValueError(f"the name {name[:40]!r} is announced at {start:,}")
        return name

    def _skip_value(self, kind: ValueType) -> None:
        if kind == ValueType.STRING:
            self._skip(self._number("<Q"))
        elif kind != ValueType.ARRAY:
            self._number(_SCALARS[kind])
        else:
            items, count = ValueType(self._number("<I")), self._number("<Q")
            if items == ValueType.ARRAY:
                raise ValueError(f"an array of arrays is announced at {self._at:,}")
            if count > _MOST_ITEMS:  # the package makes an object of each
                raise ValueError(f"an array of {count:,} items is announced at {self._at:,}")
            if items != ValueType.STRING:
                self._skip(count * struct.calcsize(_SCALARS[items]))
                return
            for _ in range(count):
                self._skip(self._number("<Q"))

    def _tensor_end(self) -> int:
        """Where a tensor's data ends, in bytes from the start of all tensors' data."""
        name, num_dims = self._name(), self._number("<I")
        if num_dims > _MOST_DIMS:
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
        elements = prod(self._number("<Q") for _ in range(num_dims))
        kind = gguf.GGMLQuantizationType(self._number("<I"))
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        return self._number("<Q") + elements * block_bytes // block_elements
