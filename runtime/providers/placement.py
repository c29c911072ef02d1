"""Which nodes of a graph landed on which provider, and whether compute was left to the CPU.

ONNX Runtime gives the CPU whatever the provider does not take, without a word. Shape arithmetic
belongs there; a matrix product there waits for two copies of its activations in every step.
Its own option against that (session.disable_cpu_ep_fallback) refuses shape arithmetic as well, so
that none of our graphs would load.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortolan.errors import ProviderError
from ortolan.runtime.providers.base import Provider
from ortolan.runtime.providers.graph_bytes import GraphNode, graph_nodes

logger = logging.getLogger(__name__)

# Session config, from ONNX Runtime 1.24 on: remember what was assigned to whom.
RECORD_ENTRY = ("session.record_ep_graph_assignment_info", "1")
CPU = "CPUExecutionProvider"

_SHOWN = 4


@dataclass(frozen=True)
class Placed:
    """Nodes of one provider, under ONNX Runtime's name for it."""

    provider: str
    nodes: tuple[GraphNode, ...]

    def operators(self, *, compute: bool) -> dict[str, int]:
        """Operator -> how many, the commonest first; of compute, or of shape arithmetic."""
        counts = Counter(node.op for node in self.nodes if node.compute == compute)
        return dict(counts.most_common())


def place(model: bytes, subgraphs: Iterable[Any], ort_name: str) -> tuple[Placed, ...]:
    """Where the nodes of a graph landed, the provider first.

    subgraphs: of `get_provider_graph_assignment_info`. WebGPU 1.27 is missing in it: nodes that
    nobody is said to have are the provider's, since no other runs them, or are optimized away.
    """
    nodes = {node.name: node for node in graph_nodes(model)}
    owners: dict[str, list[GraphNode]] = {ort_name: []}
    for subgraph in subgraphs:
        for one in subgraph.get_nodes():
            # A node that ONNX Runtime has made of others: nothing says that it is not compute.
            node = nodes.pop(one.name, GraphNode(one.name, one.op_type, compute=True))
            owners.setdefault(subgraph.ep_name, []).append(node)
    owners[ort_name] += nodes.values()
    return tuple(Placed(name, tuple(found)) for name, found in owners.items() if found)


def placement_of(session: Any, model: bytes, ort_name: str) -> tuple[Placed, ...] | None:
    """The same of a session that was opened with RECORD_ENTRY; None if it cannot tell."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    return place(model, session.get_provider_graph_assignment_info(), ort_name)


def left_to_cpu(placed: Sequence[Placed], ort_name: str) -> dict[str, int]:
    """Operators of compute that another provider's session runs on the CPU, and how many."""
    if ort_name == CPU:
        return {}
    on_cpu = next((one for one in placed if one.provider == CPU), None)
    return {} if on_cpu is None else on_cpu.operators(compute=True)


def check_placement(
    path: Path, session: Any, model: bytes, provider: Provider, version: str
) -> None:
    """Log it if the session leaves compute of that graph to the CPU.

    A warning where activations then cross between two memories.

    Where the provider is strict, raises ProviderError instead, and also if nobody can tell.
    version: onnxruntime's.
    """
    if provider.ort_name == CPU:
        return
    placed = placement_of(session, model, provider.ort_name)
    if placed is None:
        if provider.strict:
            raise ProviderError(
                "--strict needs onnxruntime 1.24 or later, which says where nodes landed; this is "
                f"{version}"
            )
        return
    fallen = left_to_cpu(placed, provider.ort_name)
    if not fallen:
        return
    if provider.strict:
        raise ProviderError(
            f"{path}: {provider.name} leaves {sum(fallen.values())} compute nodes to the CPU "
            f"({summed(fallen)}), which --strict refuses; see more with: ortolan providers BUNDLE "
            f"--provider {provider.name}"
        )
    logger.log(
        logging.INFO if provider.on_host else logging.WARNING,
        "the provider leaves compute nodes to the CPU",
        extra={"provider": provider.name, "graph": path.name, "operators": summed(fallen)},
    )


def summed(operators: dict[str, int]) -> str:
    """`MatMul 8, Add 1 and 3 more kinds`."""
    shown = [f"{op} {count}" for op, count in list(operators.items())[:_SHOWN]]
    more = len(operators) - len(shown)
    return ", ".join(shown) + (f" and {more} more kinds" if more else "")
