"""Requests of the Open Inference Protocol, written by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ortolan.proto.inference.v2 import grpc_predict_v2_pb2 as pb

Tensor = tuple[str, str, Sequence[int], Sequence[Any]]  # name, datatype, shape, elements

CODES = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d"}
FIELDS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def infer_request(
    *tensors: Tensor,
    text: str | None = "the red fox",
    raw: bool = True,
    model: str = "mock",
    request_id: str = "",
    outputs: Sequence[str] = (),
    **parameters: Any,
) -> pb.ModelInferRequest:
    """A request for `text`, with tensors beside it, and settings as parameters."""
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    if text is not None:
        tensors = (("text_input", "BYTES", [1], [text.encode()]), *tensors)
    for name, datatype, shape, values in tensors:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        if raw:
            request.raw_input_contents.append(packed(datatype, values))
        else:
            getattr(tensor.contents, FIELDS[datatype]).extend(values)
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


def packed(datatype: str, values: Sequence[Any]) -> bytes:
    """Elements as raw_input_contents has them."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    return struct.pack(f"<{len(values)}{CODES[datatype]}", *values)


def texts_of(response: pb.ModelInferResponse, name: str = "text_output") -> list[str]:
    """A BYTES output's elements, in either encoding."""
    for index, tensor in enumerate(response.outputs):
        if tensor.name == name:
            values = list(tensor.contents.bytes_contents)
            if response.raw_output_contents:
                raw = response.raw_output_contents[index]
                while raw:
                    size = struct.unpack_from("<I", raw)[0]
                    values.append(raw[4 : 4 + size])
                    raw = raw[4 + size :]
            assert list(tensor.shape) == [len(values)]
            return [value.decode() for value in values]
    raise AssertionError(f"no output {name}")


def numbers_of(response: pb.ModelInferResponse, name: str) -> list[int]:
    """A UINT32 output's elements, in either encoding."""
    for index, tensor in enumerate(response.outputs):
        if tensor.name == name:
            if response.raw_output_contents:
                raw = response.raw_output_contents[index]
                return list(struct.unpack(f"<{len(raw) // 4}I", raw))
            return list(tensor.contents.uint_contents)
    raise AssertionError(f"no output {name}")
