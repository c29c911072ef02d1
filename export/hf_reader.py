"""A Hugging Face folder as a checkpoint: config.json and one or many safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.families import FAMILIES, Family, model_config
from ortolan.export.settings import Settings
from ortolan.export.weights import Array, Weight
from ortolan.graphs.formats import WeightFormat, layer_name, weight_shapes
from ortolan.graphs.manifest import ModelConfig

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100 << 20  # the format's own limit
_LONGEST_JSON = 16 << 20

# safetensors' names of dtypes that we read.
_FORMATS = {
    "F32": (WeightFormat("float32"), np.dtype(np.float32)),
    "F16": (WeightFormat("float16"), np.dtype(np.float16)),
    "BF16": (WeightFormat("bfloat16"), np.dtype(ml_dtypes.bfloat16)),
}

# Buffers that old files hold besides the weights; they are computed.
_COMPUTED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class _Stored:
    """Where a weight is: rows `first` to `first + rows` of a tensor in a file."""

    file: Path
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


@dataclass(frozen=True)
class _Part:
    """A weight as rows of a stored tensor."""

    stored: _Stored
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
        family = _family(folder, values)
        settings = Settings(f"{folder.name}/{CONFIG}", values)
        self.config: ModelConfig = model_config(family, settings, requested_context)
        tensors = _tensors(folder)
        self._parts = _match(folder, self.config, family, tensors)
        self.formats: dict[str, WeightFormat] = {
            name: _FORMATS[part.stored.dtype][0] for name, part in self._parts.items()
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
        return weight


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        if path.stat().st_size > _LONGEST_JSON:
            raise CheckpointError(
                f"{path}: has more than {_LONGEST_JSON >> 20} MiB for a JSON file"
            )
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: has no {path.name}; give the folder of a Hugging Face checkpoint"
        ) from None
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read ({exc.strerror})") from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: is no JSON ({exc}); fetch the file again") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object; fetch the file again")
    return value


def _family(folder: Path, config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(
            f"{folder.name}/{CONFIG}: model_type {kind!r} is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    return family


def _tensors(folder: Path) -> dict[str, _Stored]:
    """Every tensor of the folder by its name."""
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if not (folder / SINGLE).is_file():
        raise CheckpointError(
            f"{folder}: has neither {SINGLE} nor {INDEX}; only safetensors are read"
        )
    return _header(folder / SINGLE)


def _sharded(folder: Path) -> dict[str, _Stored]:
    """Tensors of several files; the index and the files must tell the same."""
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{folder / INDEX}: has no weight_map of names to files")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX}: {name!r} is not a file name")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: shard {name} is missing, which {INDEX} lists")
    if extra := sorted({file.name for file in folder.glob("*.safetensors")} - set(names)):
        raise CheckpointError(f"{folder}: {extra[0]} is not listed in {INDEX}; remove one of them")
    tensors: dict[str, _Stored] = {}
    for name in names:
        for tensor, stored in _header(folder / name).items():
            if index.get(tensor) != name:
                raise CheckpointError(
                    f"{folder / name}: holds tensor {tensor}, which {INDEX} places elsewhere"
                )
            tensors[tensor] = stored
    if missing := sorted(set(index) - set(tensors)):
        raise CheckpointError(f"{folder / index[missing[0]]}: tensor {missing[0]} is missing")
    return tensors


def _header(file: Path) -> dict[str, _Stored]:
    """The tensors of one safetensors file. The library checks that the header fits the file."""
    try:
        with safetensors.safe_open(file, framework="np"):
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LONGEST_HEADER:
                raise CheckpointError(f"{file}: the header's length {length} is not possible")
            header = json.loads(stream.read(length))
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read ({exc.strerror or exc})") from exc
    except (safetensors.SafetensorError, ValueError, RecursionError) as exc:
        raise CheckpointError(
            f"{file}: the safetensors header is damaged or the file cut short ({exc}); "
            "fetch the file again"
        ) from exc
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: _Stored(
            file,
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
            start + entry["data_offsets"][1],
        )
        for name, entry in header.items()
    }


def _match(
    folder: Path, config: ModelConfig, family: Family, tensors: dict[str, _Stored]
) -> dict[str, _Part]:
    """A part of a stored tensor for each weight that the model has, and none left over."""
    shapes = weight_shapes(config)
    wanted = {_stored_name(name): (name,) for name in shapes}
    for layer in range(config.num_layers):
        for whole, pieces in family.fused.items():
            for piece in pieces:
                del wanted[f"{layer_name(layer, piece)}.weight"]
            wanted[f"{layer_name(layer, whole)}.weight"] = tuple(
                layer_name(layer, piece) for piece in pieces
            )
    found = {name for name in tensors if not name.endswith(_COMPUTED)}
    if config.tie_embeddings:
        found.discard("lm_head.weight")  # some files store the shared table twice
    if missing := sorted(set(wanted) - found):
        raise CheckpointError(
            f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all); "
            "the checkpoint is incomplete"
        )
    if extra := sorted(found - set(wanted)):
        raise ConfigError(
            f"{folder}: tensor {extra[0]} is unknown ({len(extra)} in all); "
            "leaving it out would change the model"
        )
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


def _stored_name(name: str) -> str:
    return name if name.endswith(".bias") else f"{name}.weight"
