"""Tensors of the Open Inference Protocol, from a request and into a response.

Both encodings are read: values by datatype in `contents`, or bytes in `raw_input_contents`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortolan.errors import RequestError
from ortolan.proto.inference.v2 import grpc_predict_v2_pb2 as pb

# Datatype -> the field of InferTensorContents that holds it, and struct's letter for an element.
_FIELDS = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
    "BYTES": ("bytes_contents", ""),
}
WHOLE = tuple(name for name in _FIELDS if "INT" in name)
NUMBERS = (*WHOLE, "FP32", "FP64")

# Nothing that a request may say needs more; a message full of numbers would halt every stream
# while they are turned into Python's.
MAX_ELEMENTS = 1024


@dataclass(frozen=True)
class Kind:
    """What an input may be. many: any number of elements up to MAX_ELEMENTS, rather than one."""

    datatypes: Sequence[str]
    many: bool = False

    @property
    def usual(self) -> str:
        """The datatype that most clients send."""
        return next(
            (name for name in ("FP32", "INT32") if name in self.datatypes), self.datatypes[0]
        )


def read_inputs(
    request: pb.ModelInferRequest, kinds: Mapping[str, Kind]
) -> dict[str, tuple[Any, ...]]:
    """Input name -> its elements. Raises RequestError for anything that is not as `kinds` says."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(
            f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs; it must "
            "have one for each"
        )
    read: dict[str, tuple[Any, ...]] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in kinds:
            raise RequestError(f"inputs has {shown(name)}, which is no input here")
        if name in read:
            raise RequestError(f"{name} is there twice; give each input once")
        if tensor.parameters:
            raise RequestError(f"{name} has parameters; inputs take none here")
        count = _count(tensor, kinds[name])
        if raw:
            if tensor.HasField("contents"):
                raise RequestError(
                    f"{name} has contents beside raw_input_contents; use one of the two"
                )
            read[name] = _unpacked(name, tensor.datatype, count, raw[index])
        else:
            read[name] = _contents(tensor, count)
    return read


def shown(name: str) -> str:
    """A name that the caller chose, bounded."""
    return repr(name[:64])


def _count(tensor: pb.ModelInferRequest.InferInputTensor, kind: Kind) -> int:
    """Elements of a tensor, whose datatype and shape are checked."""
    if tensor.datatype not in kind.datatypes:
        raise RequestError(
            f"{tensor.name} has the datatype {shown(tensor.datatype)}; it must be "
            + " or ".join(kind.datatypes)
        )
    shape = list(tensor.shape)
    count = shape[-1] if shape and len(shape) <= 2 and shape[:-1] in ([], [1]) else -1
    if kind.many and not 0 <= count <= MAX_ELEMENTS:
        accepted = f"[N] or [1, N] with N at most {MAX_ELEMENTS}"
    elif not kind.many and count != 1:
        accepted = "[1] or [1, 1]"
    else:
        return count
    raise RequestError(f"{tensor.name} has the shape {str(shape)[:64]}; it must be {accepted}")


def _contents(tensor: pb.ModelInferRequest.InferInputTensor, count: int) -> tuple[Any, ...]:
    field, _ = _FIELDS[tensor.datatype]
    for other, _ in tensor.contents.ListFields():
        if other.name != field:
            raise RequestError(
                f"{tensor.name} has values in {other.name}; those of datatype {tensor.datatype} "
                f"belong into {field}"
            )
    values = getattr(tensor.contents, field)
    if len(values) != count:
        raise RequestError(
            f"{tensor.name} has {len(values)} elements in {field}; its shape says {count}"
        )
    return tuple(values)


def _unpacked(name: str, datatype: str, count: int, raw: bytes) -> tuple[Any, ...]:
    code = _FIELDS[datatype][1]
    values = _texts(raw, count) if not code else None
    if code and struct.calcsize(f"<{count}{code}") == len(raw):
        values = struct.unpack(f"<{count}{code}", raw)
    if values is None:
        raise RequestError(
            f"{name} has {len(raw)} bytes in raw_input_contents, which are not {count} elements "
            f"of datatype {datatype}"
        )
    return values


def _texts(raw: bytes, count: int) -> tuple[bytes, ...] | None:
    """Elements that have their length in four bytes before each; None unless there are `count`."""
    values: list[bytes] = []
    start = 0
    while start + 4 <= len(raw) and len(values) < count:
        (size,) = struct.unpack_from("<I", raw, start)
        values.append(raw[start + 4 : start + 4 + size])
        start += 4 + size
    return tuple(values) if start == len(raw) and len(values) == count else None


def add_output(
    response: pb.ModelInferResponse, name: str, datatype: str, values: Sequence[Any], *, raw: bool
) -> None:
    """Add a tensor of one dimension, in either encoding."""
    tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    field, code = _FIELDS[datatype]
    if not raw:
        getattr(tensor.contents, field).extend(values)
    elif code:
        response.raw_output_contents.append(struct.pack(f"<{len(values)}{code}", *values))
    else:
        packed = b"".join(struct.pack("<I", len(value)) + value for value in values)
        response.raw_output_contents.append(packed)
