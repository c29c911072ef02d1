"""A GGUF model as a checkpoint: its shape, its weights by their state-dict names."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export import gguf_rope
from ortolan.export.gguf_blocks import BLOCK_FORMATS
from ortolan.export.gguf_header import check_header
from ortolan.export.gguf_model import model_config, rotary_rows, stored_weights
from ortolan.export.gguf_split import check_part, split_count, split_paths
from ortolan.export.tensor_names import check_names
from ortolan.export.weights import Weight
from ortolan.graphs.formats import WeightFormat, weight_shapes
from ortolan.graphs.manifest import ModelConfig

_READER_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error)
_ROPE_TENSORS = {gguf_rope.ALL_LENGTHS, gguf_rope.LONG, gguf_rope.SHORT}
_MOST_FACTORS = 1 << 12  # rope has one for each pair of a head


@dataclass(frozen=True)
class _Part:
    """A weight as rows of a stored tensor, whose scales may have a factor in common."""

    tensor: gguf.ReaderTensor
    first: int
    rows: int
    factor: float


class GgufCheckpoint:
    """A memory-mapped GGUF model in one file or several; weights are read one at a time.

    path: the file, or any one of several. requested_context: the positions that the export is for,
    or None for the model's own.
    formats: format of each matrix by its state-dict name (without ".weight").
    metadata: the first file's key-value pairs as plain Python values. files: as read, in order.
    Raises CheckpointError for a file that is damaged or cut short, ConfigError for a model or
    tensor type that we cannot express exactly.
    """

    format_name = "gguf"

    def __init__(self, path: Path, requested_context: int | None = None) -> None:
        self.path = path
        reader = _open(path)
        self.metadata: Mapping[str, Any] = _metadata(path, reader)
        readers = {path: reader}
        if (count := split_count(path, self.metadata)) > 1:
            readers, self.metadata = _open_parts(path, count)
        self.files: list[Path] = list(readers)
        self._stored = {t.name: t for reader in readers.values() for t in reader.tensors}
        self._file_names = {t.name: part.name for part, r in readers.items() for t in r.tensors}
        announced = self.metadata.get("split.tensors.count", len(self._stored))
        if len(self._stored) != announced and count > 1:
            raise CheckpointError(
                f"{path.name}: the {count} files hold {len(self._stored)} tensors, "
                f"split.tensors.count is {announced!r:.40}; they do not belong together"
            )
        self.config: ModelConfig = model_config(
            path.name, self.metadata, set(self._stored), self._vector, requested_context
        )
        self._parts = self._match()
        self.formats: dict[str, WeightFormat] = {
            name: BLOCK_FORMATS[part.tensor.tensor_type].format
            for name, part in self._parts.items()
        }

    def read(self, name: str) -> Weight:
        """The weight of that state-dict name, rows of q and k in Hugging Face's order.

        Raises CheckpointError if it holds an infinity or NaN: its logits would be NaN, all of them.
        """
        part = self._parts[name]
        raw = part.tensor.data
        if len(part.tensor.shape) == 2:  # a vector of BF16 comes as bytes, and is never in parts
            raw = raw[part.first : part.first + part.rows]
        weight = BLOCK_FORMATS[part.tensor.tensor_type].read(raw).times(part.factor)
        if not weight.is_finite():
            raise CheckpointError(
                f"{self._file(part.tensor)}: tensor {part.tensor.name} holds numbers that are not "
                "finite; fetch the file again"
            )
        order = rotary_rows(self.config, name)
        return weight if order is None else weight.take_rows(order)

    def _match(self) -> dict[str, _Part]:
        """A part of a stored tensor for each weight that the model has, and none left over."""
        wanted, found = stored_weights(self.config), set(self._stored) - _ROPE_TENSORS
        factors = {name: self._factor(name) for name in sorted(found) if name.endswith(".scale")}
        found -= {name for name, factor in factors.items() if factor is not None}
        hint = "the file is incomplete or of another architecture"
        check_names(self.path.name, wanted, found, hint=hint)
        shapes = weight_shapes(self.config)
        parts: dict[str, _Part] = {}
        for source, names in wanted.items():
            tensor, rows = self._stored[source], [shapes[name][0] for name in names]
            self._check(tensor, (sum(rows), *shapes[names[0]][1:]))
            factor = factors.get(f"{source.removesuffix('.weight')}.scale") or 1.0
            first = 0
            for name, count in zip(names, rows, strict=True):
                parts[name] = _Part(tensor, first, count, factor)
                first += count
        return parts

    def _check(self, tensor: gguf.ReaderTensor, want: tuple[int, ...]) -> None:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        file, kind = self._file(tensor), tensor.tensor_type
        if kind not in BLOCK_FORMATS:
            known = ", ".join(kind.name for kind in BLOCK_FORMATS)
            raise ConfigError(
                f"{file}: tensor {tensor.name} has type {kind.name}; supported are {known}"
            )
        if shape != want:
            raise CheckpointError(
                f"{file}: tensor {tensor.name} has shape {list(shape)}, "
                f"the file's own settings call for {list(want)}"
            )
        if len(want) == 1 and BLOCK_FORMATS[kind].format.blocked:
            what = "bias" if tensor.name.endswith(".bias") else "norm"
            raise ConfigError(
                f"{file}: tensor {tensor.name} is a {what} of type {kind.name}; "
                "norms and biases are read as F32, F16 or BF16"
            )

    def _factor(self, name: str) -> float | None:
        """What a tensor NAME.scale multiplies NAME.weight by, or None if it is no such tensor.

        NVFP4 files have them: llama.cpp multiplies products by them, except for the embedding.
        """
        base = name.removesuffix(".scale")
        weight = self._stored.get(f"{base}.weight")
        block = None if weight is None else BLOCK_FORMATS.get(weight.tensor_type)
        if weight is None or block is None or not block.format.blocked:
            return None
        numbers = self._vector(name)
        if base == "token_embd" or numbers is None or len(numbers) != 1:
            return None
        if not 0 < numbers[0] < np.inf:
            raise CheckpointError(
                f"{self._file(weight)}: tensor {name} is {numbers[0]}, expected a number above 0"
            )
        return numbers[0]

    def _vector(self, name: str) -> list[float] | None:
        """The numbers of a small tensor, such as rope factors, or None if there is none."""
        tensor = self._stored.get(name)
        if tensor is None:
            return None
        if tensor.tensor_type != gguf.GGMLQuantizationType.F32 or tensor.n_elements > _MOST_FACTORS:
            raise CheckpointError(
                f"{self._file(tensor)}: tensor {name} has type {tensor.tensor_type.name} and "
                f"{tensor.n_elements} numbers; factors are read as F32, at most {_MOST_FACTORS}"
            )
        return [float(number) for number in np.asarray(tensor.data).reshape(-1)]

    def _file(self, tensor: gguf.ReaderTensor) -> str:
        """The name of the file that holds a tensor."""
        return self._file_names[tensor.name]


def _open(path: Path) -> gguf.GGUFReader:
    try:
        check_header(path)
        return gguf.GGUFReader(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give a .gguf file or smollm2") from None
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read ({exc.strerror})") from exc
    except _READER_ERRORS as exc:
        raise CheckpointError(
            f"{path}: the GGUF header or a tensor in it is damaged or cut short ({exc}); "
            "fetch the file again"
        ) from exc


def _open_parts(path: Path, count: int) -> tuple[dict[Path, gguf.GGUFReader], Mapping[str, Any]]:
    """Every file of a split model, and the metadata of the first, which has it all."""
    readers: dict[Path, gguf.GGUFReader] = {}
    first: Mapping[str, Any] = {}
    names: set[str] = set()
    for index, part in enumerate(split_paths(path, count)):
        reader = readers[part] = _open(part)
        metadata = _metadata(part, reader)
        check_part(part, index, count, metadata)
        first = first or metadata
        for tensor in reader.tensors:
            if tensor.name in names:
                raise CheckpointError(f"{part}: tensor {tensor.name} is in an earlier file too")
            names.add(tensor.name)
    return readers, first


def _metadata(path: Path, reader: gguf.GGUFReader) -> dict[str, Any]:
    try:
        return {key: field.contents() for key, field in reader.fields.items()}
    except _READER_ERRORS as exc:
        raise CheckpointError(
            f"{path}: the GGUF header is damaged ({exc}); fetch the file again"
        ) from exc
