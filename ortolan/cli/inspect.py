"""`ortolan inspect`: what a bundle holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortolan.cli.options import (
    PROVIDER,
    bundle_argument,
    debug_option,
    engine_options,
    json_option,
)
from ortolan.cli.output import megabytes, note, one_line, write_json, write_table
from ortolan.errors import MissingDependencyError

if TYPE_CHECKING:
    from ortolan.graphs.manifest import Manifest

Operators = dict[str, dict[str, dict[str, int]]]  # graph -> "before" or "after" -> counts


@click.command(short_help="Show what a bundle holds.")
@bundle_argument
@click.option(
    "--operators/--no-operators",
    default=True,
    help="Count operators before and after fusion, which may build the packed weights.",
)
@engine_options(*PROVIDER, "threads", "cache_dir", "accuracy")
@json_option
@debug_option
def inspect(bundle: Path, operators: bool, engine: dict[str, Any], as_json: bool) -> None:
    """Show what BUNDLE holds: model, sampling, files, weights by precision, accuracy, operators."""
    from ortolan.cli.summary import bytes_by_precision
    from ortolan.graphs.manifest import Manifest
    from ortolan.runtime.sampling_defaults import sampling_defaults

    manifest = Manifest.read(bundle)
    sampling = sampling_defaults(bundle, manifest.model.vocab_size)
    if not as_json:
        _print_manifest(bundle, manifest, sampling)
    counts: Operators = {}
    missing: list[str] = []
    if operators:
        counts, missing = _operators(bundle, manifest, engine)
    if as_json:
        shown = dataclasses.asdict(manifest)
        shown["bytes_by_precision"] = bytes_by_precision(manifest.weights)
        shown["sampling_defaults"] = sampling
        shown["operators"] = counts if operators else None
        shown["missing"] = missing
        write_json(shown)
        return
    for graph, sides in counts.items():
        _print_operators(graph, sides)
    for reason in missing:
        note(one_line(reason))


def _operators(
    bundle: Path, manifest: Manifest, engine: dict[str, Any]
) -> tuple[Operators, list[str]]:
    """Counts per graph, and a sentence for each package whose absence leaves some out."""
    from ortolan.cli.summary import count_operators, graph_file

    try:
        counts: Operators = {
            name: {"before": count_operators(graph_file(bundle, manifest, name))}
            for name in manifest.graphs
        }
    except MissingDependencyError as error:
        return {}, [str(error)]
    try:
        optimized = _optimized_graphs(bundle, engine)
    except MissingDependencyError as error:
        return counts, [str(error)]
    for name, path in optimized.items():
        counts.setdefault(name, {"before": {}})["after"] = count_operators(path)
    return counts, []


def _optimized_graphs(bundle: Path, engine: dict[str, Any]) -> dict[str, Path]:
    from ortolan.optional import require

    require("onnxruntime", "cpu", "showing the operators after fusion")
    from ortolan.runtime.engine.packed import optimized_graphs
    from ortolan.runtime.params import EngineConfig

    return optimized_graphs(bundle, EngineConfig(**engine))


def _print_manifest(bundle: Path, manifest: Manifest, sampling: dict[str, Any]) -> None:
    from ortolan.cli.accuracy_table import write_accuracy
    from ortolan.cli.summary import bytes_by_precision, collapse_layers

    model, source = manifest.model, manifest.source
    said = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    write_table(
        None,
        [
            ("bundle", str(bundle)),
            ("source", f"{source.name} ({source.format}, SHA-256 {source.sha256[:16]}...)"),
            (
                "model",
                f"{model.architecture}, {model.num_layers} layers, width {model.hidden_size}, "
                f"{model.num_heads} heads, {model.num_kv_heads} KV heads of {model.head_dim}",
            ),
            ("vocabulary", f"{model.vocab_size} tokens"),
            ("context", f"{model.max_context} tokens"),
            ("attention", manifest.attention),
            ("computes in", f"{manifest.dtypes.activations}, KV cache {manifest.dtypes.kv}"),
            ("sampling defaults", said or "none given"),
            ("written by", f"ortolan {manifest.ortolan_version}, schema {manifest.schema_version}"),
        ],
    )
    write_table(
        ("file", "size"),
        [(name, megabytes(entry.size)) for name, entry in manifest.files.items()],
        numbers=(1,),
    )
    write_table(
        ("weights", "precision", "tensors", "elements", "size", "bits each"),
        [
            (
                group.role,
                group.precision,
                str(group.tensors),
                f"{group.elements:,}",
                megabytes(group.bytes),
                f"{8 * group.bytes / group.elements:.2f}" if group.elements else "",
            )
            for group in manifest.weights
        ],
        numbers=(2, 3, 4, 5),
    )
    write_table(
        ("precision", "size"),
        [(name, megabytes(size)) for name, size in bytes_by_precision(manifest.weights).items()],
        numbers=(1,),
    )
    write_accuracy(manifest)
    for name, graph in manifest.graphs.items():
        rows = [("input", tensor) for tensor in collapse_layers(graph.inputs)]
        rows += [("output", tensor) for tensor in collapse_layers(graph.outputs)]
        write_table(
            (name, "name", "dtype", "shape"),
            [
                (side, tensor.name, tensor.dtype, f"[{', '.join(map(str, tensor.shape))}]")
                for side, tensor in rows
            ],
        )


def _print_operators(graph: str, sides: dict[str, dict[str, int]]) -> None:
    from ortolan.cli.summary import side_by_side

    if "after" in sides:
        rows = side_by_side(sides["before"], sides["after"])
        write_table(
            (f"operators of {graph}", "before", "after"),
            [(name, str(before or ""), str(after or "")) for name, before, after in rows],
            numbers=(1, 2),
        )
    else:
        counts = [(name, str(count)) for name, count in sides["before"].items()]
        write_table((f"operators of {graph}", "before"), counts, numbers=(1,))
