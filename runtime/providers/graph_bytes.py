"""The nodes of a serialized ONNX graph, read without the onnx package.

Protobuf's wire format is a row of (field number, value); only the fields named here are read.
Source: https://protobuf.dev/programming-guides/encoding/ and onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Field numbers of onnx.proto's messages.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT = 1, 5, 11
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_OP = 1, 2, 3, 4
_TENSOR_NAME, _TENSOR_LOCATION = 8, 14
_VALUE_NAME, _VALUE_TYPE, _TYPE_TENSOR, _TENSOR_ELEMENT = 1, 2, 1, 1

_WHOLE_NUMBERS = frozenset((6, 7, 9))  # onnx.proto's int32, int64 and bool
_SHAPES = frozenset(("Shape", "Size"))


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph. compute: whether it works on weights or activations.

    The others are arithmetic on shapes and lengths: numbers that any processor has at once.
    """

    name: str
    op: str
    compute: bool


def graph_nodes(model: bytes) -> list[GraphNode]:
    """The nodes of a serialized ModelProto's main graph, in its order.

    A node computes if it reads a weight that lies in the weights file, or an input that does not
    hold whole numbers, or what such a node has made, other than its shape.
    Raises ValueError if these are not the bytes of a model.
    """
    graph = next(_messages(model, _MODEL_GRAPH), None)
    if graph is None:
        raise ValueError("no graph")
    data = {
        _text(tensor, _TENSOR_NAME)
        for tensor in _messages(graph, _GRAPH_INITIALIZER)
        if any(_numbers(tensor, _TENSOR_LOCATION))
    }
    data |= {
        _text(value, _VALUE_NAME)
        for value in _messages(graph, _GRAPH_INPUT)
        if _element(value) not in _WHOLE_NUMBERS
    }
    nodes = []
    for node in _messages(graph, _GRAPH_NODE):
        op = _text(node, _NODE_OP)
        compute = op not in _SHAPES and not data.isdisjoint(_texts(node, _NODE_INPUT))
        if compute:
            data.update(_texts(node, _NODE_OUTPUT))
        nodes.append(GraphNode(_text(node, _NODE_NAME), op, compute))
    return nodes


def _element(value: bytes) -> int | None:
    """The element type of a ValueInfoProto's tensor."""
    for kind in _messages(value, _VALUE_TYPE):
        for tensor in _messages(kind, _TYPE_TENSOR):
            return next(_numbers(tensor, _TENSOR_ELEMENT), None)
    return None


def _messages(message: bytes, number: int) -> Iterator[bytes]:
    for field, value in _fields(message):
        if field == number and isinstance(value, bytes):
            yield value


def _numbers(message: bytes, number: int) -> Iterator[int]:
    for field, value in _fields(message):
        if field == number and isinstance(value, int):
            yield value


def _texts(message: bytes, number: int) -> list[str]:
    # An absent optional input has an empty name.
    return [text for value in _messages(message, number) if (text := value.decode("utf-8"))]


def _text(message: bytes, number: int) -> str:
    return next(iter(_texts(message, number)), "")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes | None]]:
    """Field number and value of each field: a number, bytes, or None for a fixed-size number."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value: int | bytes | None = None
        match tag & 7:
            case 0:
                value, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(message, at)
                value = message[at : at + size]
                at += size
            case 5:
                at += 4
            case _:
                raise ValueError("no protobuf message")
        if at > len(message):
            raise ValueError("a protobuf message that is cut off")
        yield tag >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a protobuf message that is cut off")
