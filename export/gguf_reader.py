"""A GGUF file as a checkpoint: its model's shape, its weights by their state-dict names."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.gguf_blocks import BLOCK_FORMATS
from ortolan.export.gguf_header import check_header
from ortolan.export.gguf_llama import TENSOR_NAMES, model_config, rotary_rows
from ortolan.export.weights import Weight
from ortolan.graphs.formats import LM_HEAD, WeightFormat, weight_shapes
from ortolan.graphs.manifest import ModelConfig

_READER_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error)


class GgufCheckpoint:
    """A memory-mapped GGUF file; weights are read one at a time.

    formats: format of each matrix by its state-dict name (without ".weight").
    metadata: the file's key-value pairs as plain Python values.
    Raises CheckpointError for a file that is damaged or cut short, ConfigError for a model or
    tensor type that we cannot express exactly.
    """

    format_name = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open(path)
        self.metadata: Mapping[str, Any] = _metadata(path, reader)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        tied = "output.weight" not in tensors
        self.config: ModelConfig = model_config(path.name, self.metadata, tied=tied)
        names = _state_dict_names(path, self.config, set(tensors))
        self._tensors = {name: tensors[source] for source, name in names.items()}
        for tensor in self._tensors.values():
            if tensor.tensor_type not in BLOCK_FORMATS:
                known = ", ".join(kind.name for kind in BLOCK_FORMATS)
                raise ConfigError(
                    f"{path.name}: tensor {tensor.name} has type {tensor.tensor_type.name}; "
                    f"supported are {known}"
                )
        self._check_shapes()
        self.formats: dict[str, WeightFormat] = {
            name: BLOCK_FORMATS[tensor.tensor_type].format for name, tensor in self._tensors.items()
        }

    @property
    def files(self) -> list[Path]:
        """The files that the weights come from."""
        return [self.path]

    def read(self, name: str) -> Weight:
        """The weight of that state-dict name, rows of q and k in Hugging Face's order.

        Raises CheckpointError if it holds an infinity or NaN: its logits would be NaN, all of them.
        """
        tensor = self._tensors[name]
        block_format = BLOCK_FORMATS[tensor.tensor_type]
        weight = block_format.read(tensor.data, block_format.format)
        if not weight.is_finite():
            raise CheckpointError(
                f"{self.path.name}: tensor {tensor.name} holds numbers that are not finite; "
                "fetch the file again"
            )
        order = rotary_rows(self.config, name)
        return weight if order is None else weight.take_rows(order)

    def _check_shapes(self) -> None:
        expected = weight_shapes(self.config)
        for name, tensor in self._tensors.items():
            shape = tuple(int(size) for size in reversed(tensor.shape))
            want = expected[name]
            if shape != want:
                raise CheckpointError(
                    f"{self.path.name}: tensor {tensor.name} has shape {list(shape)}, "
                    f"the file's own settings call for {list(want)}"
                )
            if len(want) == 1 and BLOCK_FORMATS[tensor.tensor_type].format.blocked:
                raise ConfigError(
                    f"{self.path.name}: tensor {tensor.name} is a norm of type "
                    f"{tensor.tensor_type.name}; norms are read as F32, F16 or BF16"
                )


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


def _metadata(path: Path, reader: gguf.GGUFReader) -> dict[str, Any]:
    try:
        return {key: field.contents() for key, field in reader.fields.items()}
    except _READER_ERRORS as exc:
        raise CheckpointError(
            f"{path}: the GGUF header is damaged ({exc}); fetch the file again"
        ) from exc


def _state_dict_names(path: Path, config: ModelConfig, found: set[str]) -> dict[str, str]:
    """GGUF name -> state-dict name, for exactly the tensors that the model has."""
    if config.num_layers > len(found):  # before names are made for each of them
        raise CheckpointError(
            f"{path.name}: {config.num_layers} layers are announced, but there are only "
            f"{len(found)} tensors; the file is damaged or incomplete"
        )
    names: dict[str, str] = {}
    for source, target in TENSOR_NAMES.items():
        if "{i}" in source:
            for i in range(config.num_layers):
                names[source.format(i=i)] = target.format(i=i)
        else:
            names[source] = target
    names = {f"{source}.weight": target for source, target in names.items()}
    if config.tie_embeddings:
        names = {source: target for source, target in names.items() if target != LM_HEAD}
    if missing := sorted(set(names) - found):
        raise CheckpointError(
            f"{path.name}: tensor {missing[0]} is missing ({len(missing)} in all); "
            "the file is incomplete or of another architecture"
        )
    if extra := sorted(found - set(names)):
        raise ConfigError(
            f"{path.name}: tensor {extra[0]} is unknown ({len(extra)} in all); "
            "leaving it out would change the model"
        )
    return names
