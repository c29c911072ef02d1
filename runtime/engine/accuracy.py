"""Accuracy levels of quantized products: what their activations are computed in.

Products that ONNX Runtime fuses at load take the level from the session. A tied head is a
MatMulNBits node in the graph already, with the level as its attribute; there is no session option
for those, and editing the graph with the onnx package is not for a serving machine. The attribute
has one byte form, fixed by protobuf, which is replaced in the serialized graph.
"""

from __future__ import annotations

from typing import Literal

from ortolan.errors import BundleError

Accuracy = Literal["default", "exact"]

# ONNX Runtime's accuracy_level: 4 quantizes activations to int8, 1 keeps float32.
LEVELS: dict[Accuracy, int] = {"default": 4, "exact": 1}
_IN_GRAPH = LEVELS["default"]


def _attribute(level: int) -> bytes:
    """AttributeProto {name: "accuracy_level", i: level, type: INT}; ONNX fields 1, 3 and 20."""
    name = b"accuracy_level"
    return b"\x0a" + bytes([len(name)]) + name + b"\x18" + bytes([level]) + b"\xa0\x01\x02"


def with_accuracy(graph: bytes, accuracy: Accuracy) -> bytes:
    """The serialized graph with its own MatMulNBits nodes at that accuracy.

    Raises BundleError if such nodes are there in a form that we did not write.
    """
    found = graph.count(_attribute(_IN_GRAPH))
    if found != graph.count(b"accuracy_level"):
        raise BundleError(
            "the graphs have MatMulNBits nodes with an accuracy level that this version did not "
            "write; export the bundle again"
        )
    return graph.replace(_attribute(_IN_GRAPH), _attribute(LEVELS[accuracy]))
