"""A bundle in a few rows: what `ortolan inspect` shows of a manifest and its graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ortolan.errors import BundleError
from ortolan.graphs.manifest import Manifest, TensorEntry, WeightGroup
from ortolan.optional import require

_LAYER = re.compile(r"(.+?)\.(\d+)\.(.+)")


def is_plain_name(name: str) -> bool:
    """Whether a manifest's name can only mean a file in the bundle's own folder."""
    return (
        PurePosixPath(name).name == PureWindowsPath(name).name == name
        and name not in ("", "..")
        and "\0" not in name
    )


def graph_file(bundle: Path, manifest: Manifest, graph: str) -> Path:
    """The file of a graph. Raises BundleError if it is not one of the bundle's files."""
    name = manifest.graphs[graph].file
    if not is_plain_name(name) or name not in manifest.files:
        raise BundleError(
            f"{bundle}: manifest.json says that the graph {graph} is in {name!r}, which is not "
            "one of the bundle's files; export the bundle again"
        )
    return bundle / name


def collapse_layers(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """One entry for what all layers have alike: `past_key_values.0..29.key|value`.

    Entries become one if only the layer's number and what follows it differ.
    """
    rows: dict[tuple[Any, ...], list[TensorEntry]] = {}
    for tensor in tensors:
        layer = _LAYER.fullmatch(tensor.name)
        same = layer[1] if layer else ("", tensor.name)
        rows.setdefault((same, tensor.dtype, tuple(tensor.shape)), []).append(tensor)
    return [_merged(row) for row in rows.values()]


def _merged(row: list[TensorEntry]) -> TensorEntry:
    if len(row) == 1:
        return row[0]
    layers = [found for tensor in row if (found := _LAYER.fullmatch(tensor.name))]
    numbers = sorted({int(layer[2]) for layer in layers})
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        which = f"{numbers[0]}..{numbers[-1]}"
    else:
        which = ",".join(map(str, numbers))
    parts = "|".join(dict.fromkeys(layer[3] for layer in layers))
    return TensorEntry(f"{layers[0][1]}.{which}.{parts}", row[0].dtype, row[0].shape)


def bytes_by_precision(groups: Iterable[WeightGroup]) -> dict[str, int]:
    """Precision -> bytes of all weights stored in it."""
    totals: Counter[str] = Counter()
    for group in groups:
        totals[group.precision] += group.bytes
    return dict(totals)


def count_operators(path: Path) -> dict[str, int]:
    """Operator -> how often a graph file uses it, nested graphs included, the commonest first.

    Raises MissingDependencyError without the onnx package, BundleError if it is no graph.
    """
    onnx: Any = require("onnx", "export", "counting a graph's operators")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors have no common base of their own
        raise BundleError(f"{path}: is no ONNX graph ({error}); export the bundle again") from error
    counts: Counter[str] = Counter()
    graphs = [model.graph]
    while graphs:
        for node in graphs.pop().node:
            counts[f"{node.domain}.{node.op_type}" if node.domain else node.op_type] += 1
            for attribute in node.attribute:
                graphs += [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def side_by_side(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """(operator, uses before, uses after), the commonest before first, then the new ones."""
    names = dict.fromkeys([*before, *after])
    return [(name, before.get(name, 0), after.get(name, 0)) for name in names]
