"""Checkpoint in, bundle out: the one function that the command line calls."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from ortolan.errors import CheckpointError, ConfigError, UsageError
from ortolan.export.calibrated import calibrated
from ortolan.export.calibration import Ids
from ortolan.export.calibration_text import calibration_text, calibration_windows
from ortolan.export.gguf_reader import GgufCheckpoint
from ortolan.export.hf_reader import HfCheckpoint
from ortolan.export.hf_texts import hf_texts
from ortolan.export.kv_scales import kv_scales, write_scales
from ortolan.export.phases import Phase, plan_phases, write_phases
from ortolan.export.precision import (
    DEFAULT_QUANTIZATION,
    Quantization,
    WeightsChoice,
    rounded_from,
)
from ortolan.export.publish import published_folder
from ortolan.export.smooth import (
    can_be_smoothed,
    channel_scales,
    has_integer_layers,
    has_w8a8,
    head_can_be_smoothed,
    smoothed,
    smoothed_head,
)
from ortolan.export.sources import find_source, source_name
from ortolan.export.tokenizer import tokenizer_files
from ortolan.export.weights_file import WeightsFile
from ortolan.graphs import contract as c
from ortolan.graphs.build import FLAVORS, build_decoder_graph
from ortolan.graphs.contract import FloatDtype
from ortolan.graphs.flavor import Flavor
from ortolan.graphs.manifest import (
    MANIFEST_NAME,
    PACKED_NAME,
    SCHEMA_MAJOR,
    SCHEMA_MINOR,
    TEXT_NAMES,
    WEIGHTS_NAME,
    Dtypes,
    FileEntry,
    GraphEntry,
    Manifest,
    ModelConfig,
    Source,
    TensorEntry,
    WeightGroup,
    file_entry,
)
from ortolan.graphs.sample import build_sample_graph

AttentionChoice = Literal["gqa", "onnx"]  # the keys of FLAVORS
KvChoice = Literal["float", "int8"]

# The rotary tables of a longer context would take gigabytes, mostly for a damaged number.
MOST_POSITIONS = 1 << 20

# What a bundle's folder may hold.
_BUNDLE_NAMES = (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    PACKED_NAME,
    *TEXT_NAMES,
    *(f"{graph}.onnx" for graph in (*c.GRAPH_NAMES, c.DECODE_MANY)),
)

# Called before each step with what is being written, steps done, and steps in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExportOptions:
    """weights: "source" keeps the checkpoint's precision exactly, "float32" expands it, "int8" and
    "int4" round it to blocks, quantization says how; "w8a8" rounds activations too.
    prefill_weights, decode_weights: what one phase has instead.
    preset: what the precisions are called together, for the manifest.
    calibration: a text file to calibrate weights on, and to take an int8 cache's scales from;
    None takes the one that is shipped.
    max_context: positions that the rotary tables cover; None takes the checkpoint's limit.
    force: replace an existing bundle.
    attention: the flavor of the graphs; "gqa" is the fast one, "onnx" has standard operators only.
    kv: "float" keeps keys and values in what the graphs compute in, "int8" rounds them.
    dtype: what the graphs compute in; what is stored in float32 is rounded to it.
    """

    weights: WeightsChoice = "source"
    prefill_weights: WeightsChoice | None = None
    decode_weights: WeightsChoice | None = None
    calibration: Path | None = None
    preset: str = ""
    max_context: int | None = None
    force: bool = False
    quantization: Quantization = DEFAULT_QUANTIZATION
    attention: AttentionChoice = "gqa"
    kv: KvChoice = "float"
    dtype: FloatDtype = "float32"


def export_bundle(
    source: str, target: Path, options: ExportOptions, progress: Progress | None = None
) -> Manifest:
    """Write the bundle of a checkpoint; `sources.find_source` says what can be one.

    Raises CheckpointError if the source is damaged, ConfigError if it cannot be expressed exactly,
    BundleError if the target cannot be written. Headers are judged before anything is written, and
    weights as they are read; after an error nothing is left of the new bundle.
    """
    path = find_source(source)
    checkpoint = open_checkpoint(path, options.max_context)
    texts = checkpoint_texts(checkpoint)
    config = _with_context(path.name, checkpoint.config, options.max_context)
    flavor = FLAVORS[options.attention]
    _check_heads(path.name, config, flavor)
    dtypes = Dtypes(options.dtype, "int8" if options.kv == "int8" else options.dtype)
    _check_dtypes(path.name, dtypes, flavor, texts)
    phases = plan_phases(
        checkpoint,
        config,
        options.prefill_weights or options.weights,
        options.decode_weights or options.weights,
        options.quantization,
    )
    activations_rounded = any(has_w8a8(phase) for phase in phases)
    if activations_rounded and dtypes.activations != "float32":
        raise UsageError(
            f"--dtype {dtypes.activations} is not possible with w8a8 weights, whose products are "
            "made for CPUs; take --weights int4 or int8 with it, or leave --dtype out"
        )
    by_inputs = options.quantization.calibrate or activations_rounded
    if by_inputs or dtypes.kv == "int8":
        windows = calibration_windows(
            calibration_text(options.calibration),
            texts,
            # Not the bundle's own: a short context is no reason to calibrate on short windows.
            checkpoint.config.max_context,
            config.vocab_size,
            str(options.calibration or "the shipped text"),
        )
    if by_inputs:
        phases = _calibrated(phases, config, windows, options, progress)
    scales = kv_scales(checkpoint, config, windows) if dtypes.kv == "int8" else {}

    with published_folder(target, force=options.force, replaceable=_BUNDLE_NAMES) as folder:
        with WeightsFile(folder / WEIGHTS_NAME, dtypes.activations) as file:
            tensors, groups = write_phases(phases, config, flavor, file, progress)
            kv_tensors, kv_groups = write_scales(scales, file)
            tensors = {name: {**own, **kv_tensors} for name, own in tensors.items()}
        files = {WEIGHTS_NAME: file.entry}
        graphs = _write_graphs(folder, config, phases, flavor, dtypes, tensors, files)
        for name, content in texts.items():
            (folder / name).write_bytes(content)
            files[name] = file_entry(folder / name)
        if progress is not None:
            progress("manifest", 1, 1)
        manifest = Manifest(
            schema_version=f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}",
            ortolan_version=metadata.version("ortolan"),
            model=config,
            attention=flavor.name,
            graphs=graphs,
            weights=[_as_stored(group, dtypes) for group in groups] + kv_groups,
            files=files,
            source=Source(source_name(path), checkpoint.format_name, _hash(checkpoint.files)),
            preset=options.preset,
            rounded_from=rounded_from(checkpoint.formats, *(phase.formats for phase in phases)),
            dtypes=dtypes,
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _calibrated(
    phases: Sequence[Phase],
    config: ModelConfig,
    windows: Ids,
    options: ExportOptions,
    progress: Progress | None,
) -> list[Phase]:
    """The phases with their weights made for what they read on the calibration text."""
    made = list(phases)
    # Products of integers are smoothed and no more: to make their weights up for each other
    # gained nothing that could be measured (docs/presets.md).
    calibrates = options.quantization.calibrate and not all(map(has_integer_layers, phases))
    head = not calibrates and head_can_be_smoothed(phases, config)
    if head or any(can_be_smoothed(phase, config) for phase in phases):
        scales = channel_scales(phases[0].checkpoint, config, windows, progress)
        made = [smoothed(phase, config, scales.layers) for phase in phases]
    if head:
        made = [smoothed_head(phase, config, scales.head) for phase in made]
    if not calibrates:
        return made
    for i, phase in enumerate(made):
        if not has_integer_layers(phase):
            made[i] = calibrated(phase, config, windows, options.quantization, progress)
    return made


def open_checkpoint(path: Path, max_context: int | None) -> GgufCheckpoint | HfCheckpoint:
    """The reader for what is at `path`; see `export_bundle` for what it raises."""
    return HfCheckpoint(path, max_context) if path.is_dir() else GgufCheckpoint(path, max_context)


def _hash(files: Sequence[Path]) -> str:
    """SHA-256 of the one file, or of the list of the files' hashes."""
    hashes = [file_entry(file).sha256 for file in files]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def checkpoint_texts(checkpoint: GgufCheckpoint | HfCheckpoint) -> dict[str, bytes]:
    """Tokenizer, template and generation settings as files of a bundle; some may be absent."""
    if isinstance(checkpoint, HfCheckpoint):
        return hf_texts(checkpoint.path, checkpoint.config.vocab_size)
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


def _check_heads(file: str, config: ModelConfig, flavor: Flavor) -> None:
    sizes = {"head size": config.head_dim, "rotated part of a head": config.rotary_dim}
    for name, size in sizes.items():
        if size % flavor.head_dim_multiple:
            able = [other.name for other in FLAVORS.values() if not size % other.head_dim_multiple]
            raise ConfigError(
                f"{file}: {name} {size} is not supported by --attention {flavor.name}, which takes "
                f"multiples of {flavor.head_dim_multiple}"
                + (f"; add --attention {able[0]}" if able else "")
            )


def _as_stored(group: WeightGroup, dtypes: Dtypes) -> WeightGroup:
    """What is planned in float32 is stored in what the graphs compute in."""
    if group.precision != "float32":
        return group
    return dataclasses.replace(group, precision=dtypes.activations)


def _check_dtypes(file: str, dtypes: Dtypes, flavor: Flavor, texts: Mapping[str, bytes]) -> None:
    if dtypes.kv not in flavor.kv_dtypes:
        able = [other.name for other in FLAVORS.values() if dtypes.kv in other.kv_dtypes]
        raise UsageError(
            f"--kv {dtypes.kv} is not possible with --attention {flavor.name}, whose operators "
            f"know no such cache; take --attention {able[0]}"
        )
    if dtypes.kv == "int8" and "tokenizer.json" not in texts:
        raise CheckpointError(
            f"{file}: --kv int8 takes its scales from a text, and the checkpoint has no tokenizer "
            "to read one with; add its tokenizer.json, or leave --kv int8 out"
        )


def _write_graphs(
    folder: Path,
    config: ModelConfig,
    phases: Sequence[Phase],
    flavor: Flavor,
    dtypes: Dtypes,
    tensors: Mapping[str, Mapping[str, ir.ExternalTensor]],
    files: dict[str, FileEntry],
) -> dict[str, GraphEntry]:
    entries = {}
    formats = {graph: phase.formats for phase in phases for graph in phase.graphs}
    for name in (*formats, c.SAMPLE):
        if name == c.SAMPLE:
            model = build_sample_graph(config.vocab_size)
        else:
            own = formats[name], tensors[name]
            model = build_decoder_graph(name, config, *own, flavor, dtypes)
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
