"""A bundle's sessions: decode, prefill and sample, on one thread pool and one set of weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from ortolan.errors import BundleError, EngineError, ProviderError, UsageError
from ortolan.graphs.contract import (
    DECODE,
    DECODE_MANY,
    DECODES,
    PREFILL,
    PREFILL_RAGGED,
    SAMPLE,
    decoder_contract,
)
from ortolan.graphs.manifest import Manifest
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.accuracy import LEVELS, Accuracy, with_accuracy
from ortolan.runtime.engine.thread_pool import choose_pool
from ortolan.runtime.machine import adds_bytes_in_16_bits
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider
from ortolan.runtime.providers.placement import CPU, RECORD_ENTRY, check_placement

_RAGGED_SINCE = (1, 32)  # GroupQueryAttention takes query_seqlens
# 1.24 and 1.27 crash in some graphs when their packed form is run.
_PACKS_SINCE = (1, 32)
# With so many rows integer products were faster than blocks, at 6 as fast (docs/presets.md).
_MANY_SLOTS = 8
_ERRORS_ONLY = 3  # ONNX Runtime's log severity; its warnings are about our own choices


@dataclass(frozen=True)
class SessionSet:
    """`prefill` takes query_seqlens (and more than one row) if `ragged`."""

    decode: ort.InferenceSession
    prefill: ort.InferenceSession
    sample: ort.InferenceSession
    ragged: bool


def prefill_graph(provider: Provider) -> str:
    """The prefill graph that the provider can run; the ragged one does all the other does."""
    ragged = provider.capabilities.ragged_prefill and _version() >= _RAGGED_SINCE
    return PREFILL_RAGGED if ragged else PREFILL


def decode_graph(manifest: Manifest, config: EngineConfig) -> str:
    """The graph that this engine decodes with, whoever is running (rule 1).

    Raises UsageError if the bundle does not have the one that is asked for.
    """
    if config.decode_graph != "auto":
        if config.decode_graph not in manifest.graphs:
            raise UsageError(
                f"decode_graph is {config.decode_graph}, which this bundle does not have: its "
                "phases share their weights; leave it at auto"
            )
        return config.decode_graph
    many = manifest.phases_differ and config.max_slots >= _MANY_SLOTS
    return DECODE_MANY if many else DECODE


def packs_weights(provider: Provider) -> bool:
    """Whether an optimized, prepacked form of the graphs can be kept and mapped."""
    return provider.capabilities.packs_weights and _version() >= _PACKS_SINCE


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", ort.__version__)[:2])


def session_options(entries: Mapping[str, str]) -> ort.SessionOptions:
    """Options common to all sessions: their thread pool, quiet logs, and these config entries."""
    options = ort.SessionOptions()
    choose_pool(options)
    options.log_severity_level = _ERRORS_ONLY
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def optimizing_entries(provider: Provider, accuracy: Accuracy) -> dict[str, str]:
    """Config entries that decide what ONNX Runtime makes of a graph of the bundle."""
    return {
        **provider.session_config,
        "session.qdq_matmulnbits_accuracy_level": str(LEVELS[accuracy]),
    }


def open_source_graph(
    bundle: Bundle,
    graph: str,
    provider: Provider,
    accuracy: Accuracy,
    *,
    save_to: Path | None = None,
    data_name: str = "",
    record: bool = False,
) -> ort.InferenceSession:
    """A session on a graph of the bundle itself; optionally saves its optimized, packed form.

    save_to: the file for the optimized graph; `data_name` its weights file in the same folder.
    record: only remember where nodes landed, for a report; nothing is warned of or refused.
    """
    entries = optimizing_entries(provider, accuracy)
    # The graph comes as bytes, so its weights file has to be pointed out.
    entries["session.model_external_initializers_file_folder_path"] = str(bundle.path.resolve())
    if bundle.manifest.w8a8 and adds_bytes_in_16_bits():
        # Without VNNI, sums of W8A8 products overflow 16 bits unless a slower product is taken.
        # It wants unsigned weights; blocks must stay signed, or they are not fused and fail.
        entries["session.x64quantprecision"] = "1"
        entries["session.qdqisint8allowed"] = "1"
    if record or provider.ort_name != CPU:
        entries |= [RECORD_ENTRY]
    if save_to is not None:
        entries["session.save_external_prepacked_constant_initializers"] = "1"
        entries["session.optimized_model_external_initializers_file_name"] = data_name
    options = session_options(entries)
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    path = bundle.graph_path(graph)
    model = with_accuracy(path.read_bytes(), accuracy)
    session = _open(path, model, options, provider, captured=graph in DECODES)
    if not record:
        check_placement(path, session, model, provider, ort.__version__)
    return session


def open_packed_graph(path: Path, provider: Provider) -> ort.InferenceSession:
    """A session on an optimized, packed graph, whose weights are memory-mapped."""
    options = session_options(provider.session_config)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _open(path, str(path), options, provider)


def open_tiny_graph(graph: bytes, provider: Provider) -> ort.InferenceSession:
    """A session on one of our own graphs of a node or two (see engine/tiny_graphs.py)."""
    return _open(Path("a graph of Ortolan's"), graph, session_options({}), provider)


def _open(
    path: Path,
    model: bytes | str,
    options: ort.SessionOptions,
    provider: Provider,
    *,
    captured: bool = False,
) -> ort.InferenceSession:
    try:
        session: ort.InferenceSession = provider.open_session(
            ort, model, options, captured=captured
        )
        return session
    except ProviderError:
        raise
    except Exception as exc:
        raise EngineError(
            f"{path}: onnxruntime {ort.__version__} cannot load it for provider {provider.name}: "
            f"{exc}"
        ) from exc


def open_sessions(
    bundle: Bundle,
    provider: Provider,
    accuracy: Accuracy,
    packed: Mapping[str, Path] | None,
    decode_name: str = DECODE,
) -> SessionSet:
    """Sessions from the packed graphs, or from the bundle's own where there are none.

    decode_name: see decode_graph.
    """
    name = prefill_graph(provider)
    names = (decode_name, name)
    if packed is None:
        decode, prefill = (open_source_graph(bundle, graph, provider, accuracy) for graph in names)
    else:
        decode, prefill = (open_packed_graph(packed[graph], provider) for graph in names)
    for graph, session in zip(names, (decode, prefill), strict=True):
        _check_contract(bundle, graph, session)
    sample = open_source_graph(bundle, SAMPLE, provider, accuracy)
    return SessionSet(decode, prefill, sample, ragged=name == PREFILL_RAGGED)


def _check_contract(bundle: Bundle, graph: str, session: ort.InferenceSession) -> None:
    """Raises BundleError if the graph does not take what the manifest's model calls for."""
    model = bundle.manifest.model
    contract = decoder_contract(
        graph,
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_dtype=bundle.manifest.dtypes.kv,
    )
    found = {value.name: list(value.shape) for value in session.get_inputs()}
    found |= {value.name: list(value.shape) for value in session.get_outputs()}
    wanted = {spec.name: list(spec.shape) for spec in (*contract.inputs, *contract.outputs)}
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            raise BundleError(
                f"{bundle.graph_path(graph)}: {name} is {found.get(name, 'missing')}, the model in "
                f"manifest.json calls for {wanted.get(name, 'none')}; export the bundle again"
            )
