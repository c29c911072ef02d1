"""Where the nodes of a bundle's graphs land on a provider, found by loading them there."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from ortolan.errors import ProviderError
from ortolan.graphs.contract import DECODE, SAMPLE
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.sessions import open_source_graph, prefill_graph
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import configured_provider
from ortolan.runtime.providers.placement import Placed, placement_of


def graph_placements(
    bundle_path: Path, config: EngineConfig
) -> tuple[str, dict[str, tuple[Placed, ...]]]:
    """ONNX Runtime's name of the provider, and placements by graph: decode, prefill, sample.

    Raises ProviderError where this ONNX Runtime cannot tell.
    """
    bundle = Bundle.open(bundle_path)
    use_threads(config.threads)
    provider = configured_provider(config, ort)
    placements = {}
    for graph in (DECODE, prefill_graph(provider), SAMPLE):
        session = open_source_graph(bundle, graph, provider, config.accuracy, record=True)
        placed = placement_of(session, bundle.graph_path(graph).read_bytes(), provider.ort_name)
        if placed is None:
            raise ProviderError(
                f"onnxruntime {ort.__version__} cannot say where nodes landed; 1.24 and later can"
            )
        placements[graph] = placed
        del session  # its weights make room for the next
    return provider.ort_name, placements
