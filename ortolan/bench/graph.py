"""A decoder graph read for measuring: its nodes, what each is for, and the weights each reads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ortolan.errors import BundleError
from ortolan.optional import require

Kind = Literal[
    "embedding",
    "qkv",
    "attention",
    "out",
    "gate_up",
    "activation",
    "down",
    "norm",
    "head",
    "offsets",
    "sampling",
    "other",
]

FLOAT32 = "float32"
IN_FLOAT32 = ", inputs in float32"  # ends the name of a quantized product that computes so
ATTENTION_OPS = ("GroupQueryAttention", "Attention", "MultiHeadAttention")
_GATHERS = ("Gather", "GatherBlockQuantized")
# Operators that a stored weight may pass before its product.
_WEIGHT_STEPS = ("Cast", "DequantizeLinear", "Transpose", "Reshape", "Identity", "Unsqueeze")
_OFFSETS = "weight_offset"
_BITS = {1: 32, 10: 16, 16: 16, 2: 8, 3: 8, 21: 4, 22: 4, 6: 32, 7: 64, 11: 64, 9: 8}

# Module paths as graphs/decoder.py names them; the first that is found counts.
_BY_PATH: tuple[tuple[str, Kind], ...] = (
    ("embed_tokens/", "embedding"),
    ("lm_head", "head"),
    ("norm", "norm"),
    (r"\b(q|k|v|qkv)_proj", "qkv"),
    ("o_proj", "out"),
    (r"\b(gate|up|gate_up)_proj", "gate_up"),
    ("down_proj", "down"),
    ("self_attn", "attention"),
    ("/mlp/|QuickGelu", "activation"),
)


@dataclass(frozen=True)
class Node:
    """One operator. What it costs per row of its input (a token, or a position with logits).

    format: whose peak its product is measured against ("float32", "int4 block 32"), or "".
    weight_bytes: read once per call, as stored; table_bytes: per row gathered; flops: per row,
    two for each weight. layer: -1 outside of layers.
    """

    name: str
    op: str
    kind: Kind
    layer: int
    format: str = ""
    weight_bytes: float = 0.0
    table_bytes: float = 0.0
    flops: float = 0.0
    size: tuple[int, int] = (0, 0)  # K and N of a product, where the graph says them


def read_graph(path: Path) -> list[Node]:
    """The nodes of an ONNX file, whose weights file is not opened.

    Raises MissingDependencyError without onnx, BundleError if the file is no graph.
    """
    onnx = require("onnx", "bench", "counting a graph's work")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as exc:  # protobuf's own classes derive from Exception
        raise BundleError(f"{path}: is no ONNX graph; export the bundle again") from exc
    return list(_Reader(model.graph).nodes())


class _Reader:
    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._made_by = {output: node for node in graph.node for output in node.output}
        self._offsets = _offset_nodes(graph)

    def nodes(self) -> Iterator[Node]:
        for index, node in enumerate(self._graph.node):
            kind: Kind = "offsets" if index in self._offsets else _kind_of(node)
            found = re.search(r"layers\.(\d+)", " ".join([node.name, *node.input]))
            base = {
                "name": node.name,
                "op": node.op_type,
                "kind": kind,
                "layer": int(found[1]) if found else -1,
            }
            yield Node(**base, **self._cost(node))

    def _cost(self, node: Any) -> dict[str, Any]:
        attributes = {item.name: item.i for item in node.attribute}
        if node.op_type == "MatMulNBits":
            k, n = attributes["K"], attributes["N"]
            return {
                "format": _product_format(attributes),
                "weight_bytes": sum(self._bytes(name) for name in node.input[1:]),
                "flops": 2.0 * k * n,
                "size": (k, n),
            }
        if "MatMul" in node.op_type or "Gemm" in node.op_type:
            # The product's weight, and a bias; the other operand is an activation.
            weights = [found for name in node.input if (found := self._weight(name))]
            if not weights:
                return {}
            elements, dims, _ = max(weights)
            return {
                "format": FLOAT32,
                "weight_bytes": sum(size for _, _, size in weights),
                "flops": 2.0 * elements,
                "size": (dims[-2], dims[-1]) if len(dims) > 1 else (0, 0),
            }
        if node.op_type in _GATHERS and node.input[0] in self._stored:
            tables = [name for name in node.input if name in self._stored]
            rows = self._stored[node.input[0]].dims[0]
            return {"table_bytes": sum(self._bytes(name) for name in tables) / rows}
        # Norms and biases; larger constants of such nodes are tables read in part.
        vectors = [name for name in node.input if self._is_vector(name)]
        return {"weight_bytes": float(sum(self._bytes(name) for name in vectors))}

    def _weight(self, name: str) -> tuple[int, list[int], float] | None:
        """Elements, dimensions and stored bytes of the weight that `name` holds, if it does."""
        if name in self._stored:
            dims = list(self._stored[name].dims)
            return _elements(dims), dims, self._bytes(name)
        maker = self._made_by.get(name)
        if maker is None or maker.op_type not in _WEIGHT_STEPS:
            return None
        found = self._weight(maker.input[0])
        if found is None:
            return None
        more = sum(self._bytes(extra) for extra in maker.input[1:])  # scales, zero points
        return found[0], found[1], found[2] + more

    def _bytes(self, name: str) -> float:
        tensor = self._stored.get(name)
        if tensor is None:
            return 0.0
        return _elements(tensor.dims) * _BITS.get(tensor.data_type, 8) / 8

    def _is_vector(self, name: str) -> bool:
        tensor = self._stored.get(name)
        return tensor is not None and len(tensor.dims) == 1 and tensor.data_type == 1


def _product_format(attributes: dict[str, int]) -> str:
    """The name of a quantized product, which says how its inputs are computed with."""
    name = f"int{attributes.get('bits', 4)} block {attributes['block_size']}"
    return name if attributes.get("accuracy_level", 0) == 4 else name + IN_FLOAT32


def _elements(dims: Iterable[int]) -> int:
    product = 1
    for size in dims:
        product *= size
    return product


def _kind_of(node: Any) -> Kind:
    if node.op_type in ATTENTION_OPS:
        return "attention"
    if "LayerNormalization" in node.op_type or "RMSNormalization" in node.op_type:
        return "norm"
    # A node that a fusion made may have no name of its own; what it writes has one.
    for text in (node.name, *node.output):
        for pattern, kind in _BY_PATH:
            if re.search(pattern, text):
                return kind
    return "other"


def _offset_nodes(graph: Any) -> set[int]:
    """Indices of the nodes that add an affine format's offsets.

    These are the products with offsets, all that only they need (the sums of blocks), and the
    additions of what they make.
    """
    readers: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.node):
        for place, name in enumerate(node.input):
            # What a Gemm adds to (C) is the layer's own product, not a part of the offsets.
            readers[name].append(-1 if node.op_type == "Gemm" and place == 2 else index)
    products = {
        index
        for index, node in enumerate(graph.node)
        if ("MatMul" in node.op_type or "Gemm" in node.op_type)
        and any(_OFFSETS in name for name in node.input[1:])
    }
    found = set(products)
    for index in reversed(range(len(graph.node))):
        consumers = {reader for name in graph.node[index].output for reader in readers[name]}
        if consumers and consumers <= found:
            found.add(index)
    made = {output for index in products for output in graph.node[index].output}
    found |= {
        index
        for index, node in enumerate(graph.node)
        if node.op_type == "Add" and made.intersection(node.input)
    }
    return found
