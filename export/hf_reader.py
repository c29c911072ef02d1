"""A Hugging Face folder as a checkpoint: config.json and one or many safetensors files."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.families import FAMILIES, Family, model_config
from ortolan.export.hf_json import read_json
from ortolan.export.hf_shards import Stored, stored_tensors
from ortolan.export.settings import Settings
from ortolan.export.sources import source_name
from ortolan.export.tensor_names import check_names
from ortolan.export.weights import Array, Weight
from ortolan.graphs.formats import FLOAT32, WeightFormat, layer_name, weight_shapes
from ortolan.graphs.manifest import ModelConfig

CONFIG = "config.json"
_COMPARED_BYTES = 16 << 20

# safetensors' names of dtypes that we read.
_FORMATS = {
    "F32": (WeightFormat("float32"), np.dtype(np.float32)),
    "F16": (WeightFormat("float16"), np.dtype(np.float16)),
    "BF16": (WeightFormat("bfloat16"), np.dtype(ml_dtypes.bfloat16)),
}

_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"

# Buffers that old files hold besides the weights; they are computed.
_COMPUTED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class _Part:
    """A weight as rows of a stored tensor."""

    stored: Stored
    first: int
    rows: int


class HfCheckpoint:
    """A folder with config.json and safetensors; weights are mapped and read one at a time.

    requested_context: the positions that the export is for, or None for the model's own.
    Raises CheckpointError for a folder that is incomplete or contradicts itself, ConfigError for a
    model that we cannot express exactly.
    """

    format_name = "safetensors"

    def __init__(self, folder: Path, requested_context: int | None = None) -> None:
        self.path = folder
        values = read_json(folder / CONFIG)
        where = f"{source_name(folder)}/{CONFIG}"
        family = _family(where, values)
        tensors = stored_tensors(folder)
        layers = values.get("num_hidden_layers")
        if isinstance(layers, int) and layers > len(tensors):  # before anything is made per layer
            raise CheckpointError(
                f"{where}: has {layers} layers, but there are only {len(tensors)} tensors"
            )
        self.config: ModelConfig = model_config(family, Settings(where, values), requested_context)
        self._parts = _match(folder, self.config, family, tensors)
        self._centred = _norms(self.config) if family.centred_norms else frozenset()
        self.formats: dict[str, WeightFormat] = {
            name: FLOAT32 if name in self._centred else _FORMATS[part.stored.dtype][0]
            for name, part in self._parts.items()
        }

    @property
    def files(self) -> list[Path]:
        """The files that the weights come from, sorted."""
        return sorted({part.stored.file for part in self._parts.values()})

    def read(self, name: str) -> Weight:
        """The weight of that name. Raises CheckpointError if a number in it is not finite."""
        part = self._parts[name]
        fmt, dtype = _FORMATS[part.stored.dtype]
        columns = math.prod(part.stored.shape[1:])
        count = part.rows * columns
        offset = part.stored.begin + part.first * columns * dtype.itemsize
        mapped: Array = np.memmap(
            part.stored.file, dtype=dtype, mode="r", offset=offset, shape=(count,)
        )
        weight = Weight(fmt, np.asarray(mapped).reshape(part.rows, *part.stored.shape[1:]))
        if not weight.is_finite():
            raise CheckpointError(
                f"{part.stored.file}: tensor {part.stored.tensor} holds numbers that are not "
                "finite; fetch the file again"
            )
        if name in self._centred:  # as transformers adds: in float32
            return Weight(FLOAT32, weight.dequantized() + np.float32(1))
        return weight


def _family(where: str, config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(
            f"{where}: model_type {reprlib.repr(kind)} is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    return family


def _match(
    folder: Path, config: ModelConfig, family: Family, tensors: dict[str, Stored]
) -> dict[str, _Part]:
    """A part of a stored tensor for each weight that the model has, and none left over."""
    shapes = weight_shapes(config)
    wanted: dict[str, tuple[str, ...]] = {_stored_name(name): (name,) for name in shapes}
    for layer in range(config.num_layers):
        for whole, pieces in family.fused.items():
            for piece in pieces:
                del wanted[f"{layer_name(layer, piece)}.weight"]
            wanted[f"{layer_name(layer, whole)}.weight"] = tuple(
                layer_name(layer, piece) for piece in pieces
            )
    found = {name for name in tensors if not name.endswith(_COMPUTED)}
    if config.tie_embeddings and _HEAD in found and _TABLE in found:
        _check_same(tensors[_HEAD], tensors[_TABLE])
        found.discard(_HEAD)
    check_names(folder, wanted, found, hint="the checkpoint is incomplete")
    parts: dict[str, _Part] = {}
    for tensor, names in wanted.items():
        stored = tensors[tensor]
        rows = [shapes[name][0] for name in names]
        want = (sum(rows), *shapes[names[0]][1:])
        if stored.shape != want:
            raise CheckpointError(
                f"{stored.file}: tensor {tensor} has shape {list(stored.shape)}, "
                f"{CONFIG} calls for {list(want)}"
            )
        if stored.dtype not in _FORMATS:
            raise ConfigError(
                f"{stored.file}: tensor {tensor} has dtype {stored.dtype}; "
                f"supported are {', '.join(_FORMATS)}"
            )
        first = 0
        for name, count in zip(names, rows, strict=True):
            parts[name] = _Part(stored, first, count)
            first += count
    return parts


def _check_same(head: Stored, table: Stored) -> None:
    """Some files store a shared table twice. Raises ConfigError where that makes two tables."""

    def pieces(stored: Stored, stream: BinaryIO) -> Iterator[bytes]:
        stream.seek(stored.begin)
        for at in range(stored.begin, stored.end, _COMPARED_BYTES):
            yield stream.read(min(_COMPARED_BYTES, stored.end - at))

    with head.file.open("rb") as a, table.file.open("rb") as b:
        same = (head.dtype, head.shape) == (table.dtype, table.shape) and all(
            x == y for x, y in zip(pieces(head, a), pieces(table, b), strict=True)
        )
    if not same:
        raise ConfigError(
            f"{head.file}: {_HEAD} is not {_TABLE}, though {CONFIG} says tie_word_embeddings; "
            "set it to false there if the head is meant to be its own"
        )


def _norms(config: ModelConfig) -> frozenset[str]:
    """The names of all norms."""
    shapes = weight_shapes(config).items()
    return frozenset(n for n, shape in shapes if len(shape) == 1 and not n.endswith(".bias"))


def _stored_name(name: str) -> str:
    return name if name.endswith(".bias") else f"{name}.weight"
