"""Bytes and floating-point operations of a call, counted from its graph, and the bound they set.

Counted are what must come from memory and what must be multiplied: every weight once per call, as
stored; the gathered rows of the embedding; the keys and values read and written; products and
attention at two operations per multiply-add. Activations are left out: they stay in the caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ortolan.bench.graph import ATTENTION_OPS, FLOAT32, Node
from ortolan.graphs.manifest import ModelConfig


@dataclass(frozen=True)
class Call:
    """One call of a decoder graph: `chunk` new tokens in each of `batch` rows that hold `past`.

    Logits are wanted of one position per row. kv_bytes: of one number in the KV cache.
    """

    batch: int
    chunk: int
    past: int
    kv_bytes: int = 4


@dataclass(frozen=True)
class Cost:
    """Bytes from memory, and operations by the format whose peak bounds them."""

    bytes: float
    flops: Mapping[str, float]

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, Counter(self.flops) + Counter(other.flops))


NOTHING = Cost(0.0, {})


@dataclass(frozen=True)
class Peaks:
    """What the machine reached: bytes/s read, operations/s by format."""

    bandwidth: float
    flops: Mapping[str, float]


@dataclass(frozen=True)
class Bound:
    """The least time that a cost can take here, and which side sets it."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def limit(self) -> Literal["memory", "compute"]:
        return "memory" if self.memory_s >= self.compute_s else "compute"


def bound_of(cost: Cost, peaks: Peaks) -> Bound:
    """The bound of a cost; a format without a peak of its own is held against float32's."""
    float32 = peaks.flops[FLOAT32]
    compute_s = sum(
        flops / peaks.flops.get(format_name, float32) for format_name, flops in cost.flops.items()
    )
    return Bound(cost.bytes / peaks.bandwidth, compute_s)


def node_cost(node: Node, config: ModelConfig, call: Call) -> Cost:
    """What one node costs in one call."""
    tokens = call.batch * call.chunk
    if node.op in ATTENTION_OPS and node.kind == "attention":
        return _attention_cost(config, node.layer, call)
    # The head and its norm see one position per row; the norm's weights are all that counts.
    rows = call.batch if node.kind == "head" or (node.layer < 0 and node.format) else tokens
    moved = node.weight_bytes + node.table_bytes * rows
    return Cost(moved, {node.format: node.flops * rows} if node.flops else {})


def call_cost(nodes: Iterable[Node], config: ModelConfig, call: Call) -> Cost:
    """What a call costs in all."""
    total = NOTHING
    for node in nodes:
        total += node_cost(node, config, call)
    return total


def prefill_cost(
    nodes: Sequence[Node], config: ModelConfig, chunks: Sequence[int], kv_bytes: int = 4
) -> Cost:
    """What reading a prompt costs in calls of these sizes: each reads all weights again."""
    total, past = NOTHING, 0
    for chunk in chunks:
        total += call_cost(nodes, config, Call(1, chunk, past, kv_bytes))
        past += chunk
    return total


def decode_cost(
    nodes: Sequence[Node],
    config: ModelConfig,
    batch: int,
    past: int,
    steps: int,
    kv_bytes: int = 4,
) -> Cost:
    """What an average one of `steps` decode steps costs, the first at `past` tokens."""
    # Cost is linear in the length, so the middle stands for the mean.
    return call_cost(nodes, config, Call(batch, 1, past + (steps - 1) // 2, kv_bytes))


def _attention_cost(config: ModelConfig, layer: int, call: Call) -> Cost:
    window = config.layer_window(layer) or call.past + call.chunk
    pairs = sum(min(call.past + i + 1, window) for i in range(call.chunk))
    seen = min(call.past + call.chunk, window + call.chunk - 1)
    row_bytes = 2 * config.num_kv_heads * config.head_dim * call.kv_bytes
    # Scores and the weighted sum: a multiply-add each per head, dimension and pair.
    flops = 4.0 * config.num_heads * config.head_dim * pairs
    return Cost(call.batch * row_bytes * (seen + call.chunk), {FLOAT32: float(call.batch * flops)})
