"""Graphs of one or two nodes, for what can only be done where a provider's memory is.

A serving machine has no onnx package, and these need none: a model is written down as protobuf
prescribes it. Field numbers are those of onnx.proto (ONNX 1.17); tests hold the result against
the onnx package.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

IR_VERSION = 10
OPSET = 21

# TensorProto.DataType, by the contract's names.
DTYPES = {
    "float32": 1,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "bfloat16": 16,
}
BYTES = {"float32": 4, "int8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Port:
    """An input or output of a tiny graph; every dimension is free."""

    name: str
    dtype: str
    rank: int


def zeros_graph(dtype: str, rank: int) -> bytes:
    """`shape` int64 [n] -> `out`, zeros of that shape.

    The one way to get memory of a provider whose memory Python cannot allocate.
    """
    zero = _tensor("zero", DTYPES[dtype], [1], bytes(BYTES[dtype]))
    nodes = [_node("Expand", ["zero", "shape"], ["out"])]
    return _model(nodes, [Port("shape", "int64", 1)], [Port("out", dtype, rank)], [zero])


def take_graph(dtype: str) -> bytes:
    """`slots` [n, heads, capacity, head_dim], `index` int64 [1] -> `row` [1, ...], a copy."""
    nodes = [_node("Gather", ["slots", "index"], ["row"], [_int("axis", 0)])]
    ports = [Port("slots", dtype, 4), Port("index", "int64", 1)]
    return _model(nodes, ports, [Port("row", dtype, 4)])


def put_graph(dtype: str) -> bytes:
    """`slots`, `row` and `chosen` bool [n, 1, 1, 1] -> `out`, the slots with the chosen replaced.

    `out` must not be the buffer of `slots`: an ordinary operator may not write what it reads.
    """
    nodes = [_node("Where", ["chosen", "row", "slots"], ["out"])]
    ports = [Port("slots", dtype, 4), Port("row", dtype, 4), Port("chosen", "bool", 4)]
    return _model(nodes, ports, [Port("out", dtype, 4)])


def pick_graph(vocab_size: int) -> bytes:
    """`logits` float32 [batch, n, vocab], `index` int64 [m] -> `picked` [m, vocab].

    index counts positions of all rows, one row after another.
    """
    flat = _tensor("flat", DTYPES["int64"], [2], struct.pack("<2q", -1, vocab_size))
    nodes = [
        _node("Reshape", ["logits", "flat"], ["rows"]),
        _node("Gather", ["rows", "index"], ["picked"], [_int("axis", 0)]),
    ]
    ports = [Port("logits", "float32", 3), Port("index", "int64", 1)]
    return _model(nodes, ports, [Port("picked", "float32", 2)], [flat])


def product_graph() -> bytes:
    """`a` and `b` float32 [n, n] -> `out`, their product: what every provider is there for."""
    nodes = [_node("MatMul", ["a", "b"], ["out"])]
    ports = [Port("a", "float32", 2), Port("b", "float32", 2)]
    return _model(nodes, ports, [Port("out", "float32", 2)])


def _model(
    nodes: Sequence[bytes],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    initializers: Sequence[bytes] = (),
) -> bytes:
    graph = b"".join(_field(1, node) for node in nodes)
    graph += _field(2, b"tiny")
    graph += b"".join(_field(5, tensor) for tensor in initializers)
    graph += b"".join(_field(11, _port(port)) for port in inputs)
    graph += b"".join(_field(12, _port(port)) for port in outputs)
    opset = _field(1, b"") + _number(2, OPSET)
    return _number(1, IR_VERSION) + _field(7, graph) + _field(8, opset)


def _node(
    op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[bytes] = ()
) -> bytes:
    node = b"".join(_field(1, name.encode()) for name in inputs)
    node += b"".join(_field(2, name.encode()) for name in outputs)
    node += _field(3, op_type.lower().encode()) + _field(4, op_type.encode())
    return node + b"".join(_field(5, attribute) for attribute in attributes)


def _int(name: str, value: int) -> bytes:
    """AttributeProto of type INT (2)."""
    return _field(1, name.encode()) + _number(3, value) + _number(20, 2)


def _tensor(name: str, data_type: int, dims: Sequence[int], data: bytes) -> bytes:
    tensor = b"".join(_number(1, dim) for dim in dims) + _number(2, data_type)
    return tensor + _field(8, name.encode()) + _field(9, data)


def _port(port: Port) -> bytes:
    """ValueInfoProto with a tensor type whose dimensions have names and no sizes."""
    dims = b"".join(
        _field(1, _field(2, f"{port.name}_{place}".encode())) for place in range(port.rank)
    )
    tensor_type = _number(1, DTYPES[port.dtype]) + _field(2, dims)
    return _field(1, port.name.encode()) + _field(2, _field(1, tensor_type))


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
