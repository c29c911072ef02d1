"""Checkpoint in, bundle out: the one function that the command line calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from ortolan.errors import CheckpointError, ConfigError, UsageError
from ortolan.export.gguf_reader import GgufCheckpoint
from ortolan.export.publish import published_folder
from ortolan.export.sources import find_source
from ortolan.export.tokenizer import tokenizer_files
from ortolan.export.weights_file import WeightsFile
from ortolan.export.write_weights import WeightsWriter
from ortolan.graphs import contract as c
from ortolan.graphs.build import build_decoder_graph
from ortolan.graphs.formats import FLOAT32, Formats
from ortolan.graphs.manifest import (
    MANIFEST_NAME,
    PACKED_NAME,
    SCHEMA_MAJOR,
    SCHEMA_MINOR,
    TEXT_NAMES,
    WEIGHTS_NAME,
    FileEntry,
    GraphEntry,
    Manifest,
    ModelConfig,
    Source,
    TensorEntry,
    file_entry,
)
from ortolan.graphs.sample import build_sample_graph

WeightsChoice = Literal["source", "float32"]

# The rotary tables of a longer context would take gigabytes, mostly for a damaged number.
MOST_POSITIONS = 1 << 20

# What a bundle's folder may hold.
_BUNDLE_NAMES = (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    PACKED_NAME,
    *TEXT_NAMES,
    *(f"{graph}.onnx" for graph in c.GRAPH_NAMES),
)

# Called before each step with what is being written, steps done, and steps in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExportOptions:
    """weights: "source" keeps the checkpoint's precision exactly, "float32" expands it.

    max_context: positions that the rotary tables cover; None takes the checkpoint's limit.
    force: replace an existing bundle.
    """

    weights: WeightsChoice = "source"
    max_context: int | None = None
    force: bool = False


def export_bundle(
    source: str, target: Path, options: ExportOptions, progress: Progress | None = None
) -> Manifest:
    """Write the bundle of a checkpoint: a GGUF file, or the name of a known one ("smollm2").

    Raises CheckpointError if the source is damaged, ConfigError if it cannot be expressed exactly,
    BundleError if the target cannot be written. Headers are judged before anything is written, and
    weights as they are read; after an error nothing is left of the new bundle.
    """
    path = find_source(source)
    checkpoint = GgufCheckpoint(path)
    texts = _texts(checkpoint)
    config = _with_context(path.name, checkpoint.config, options.max_context)
    formats = dict(checkpoint.formats)
    if options.weights == "float32":
        formats = dict.fromkeys(formats, FLOAT32)

    with published_folder(target, force=options.force, replaceable=_BUNDLE_NAMES) as folder:
        with WeightsFile(folder / WEIGHTS_NAME) as file:
            writer = WeightsWriter(checkpoint, config, formats, file)
            items = list(writer.items())
            for done, item in enumerate(items):
                if progress is not None:
                    progress(item.name, done, len(items))
                writer.run(item)
        files = {WEIGHTS_NAME: file.entry}
        graphs = _write_graphs(folder, config, formats, file.tensors, files)
        for name, text in texts.items():
            (folder / name).write_bytes(text)
            files[name] = file_entry(folder / name)
        if progress is not None:
            progress("manifest", len(items), len(items))
        manifest = Manifest(
            schema_version=f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}",
            ortolan_version=metadata.version("ortolan"),
            model=config,
            attention="gqa",
            graphs=graphs,
            weights=writer.groups,
            files=files,
            source=Source(path.name, checkpoint.format_name, file_entry(path).sha256),
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _texts(checkpoint: GgufCheckpoint) -> dict[str, bytes]:
    try:
        return tokenizer_files(checkpoint.metadata)
    except CheckpointError as exc:  # knows the setting, not the file
        raise type(exc)(f"{checkpoint.path.name}: {exc}") from exc


def _with_context(file: str, config: ModelConfig, max_context: int | None) -> ModelConfig:
    most = min(config.max_context, MOST_POSITIONS)
    if max_context is None:
        if config.max_context > most:
            raise ConfigError(
                f"{file}: its context of {config.max_context:,} positions is beyond {most:,}; "
                "choose a smaller one with --max-context"
            )
        return config
    if not 2 <= max_context <= most:
        raise UsageError(
            f"--max-context {max_context} is not possible; this checkpoint allows 2 to {most}"
        )
    return dataclasses.replace(config, max_context=max_context)


def _write_graphs(
    folder: Path,
    config: ModelConfig,
    formats: Formats,
    tensors: Mapping[str, ir.ExternalTensor],
    files: dict[str, FileEntry],
) -> dict[str, GraphEntry]:
    entries = {}
    for name in c.GRAPH_NAMES:
        if name == c.SAMPLE:
            model = build_sample_graph(config.vocab_size)
        else:
            model = build_decoder_graph(name, config, formats, tensors)
        path = folder / f"{name}.onnx"
        ir.save(model, path)
        files[path.name] = file_entry(path)
        entries[name] = GraphEntry(
            path.name, _entries(model.graph.inputs), _entries(model.graph.outputs)
        )
    return entries


def _entries(values: Sequence[ir.Value]) -> list[TensorEntry]:
    """Names, dtypes and shapes as they really are in the graph."""
    return [
        TensorEntry(
            str(value.name),
            value.dtype.numpy().name if value.dtype else "unknown",
            [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()],
        )
        for value in values
    ]
