"""The tensors of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import safetensors

from ortolan.errors import CheckpointError
from ortolan.export.hf_json import parse_json, printable, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100 << 20  # the format's own limit
# Mistral puts the same weights a second time beside Hugging Face's files, under other names.
_SECOND_COPY = "consolidated"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. dtype: safetensors' name for it."""

    file: Path
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder by its name."""
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if not (folder / SINGLE).is_file():
        raise CheckpointError(
            f"{folder}: has neither {SINGLE} nor {INDEX}; only safetensors are read"
        )
    if extra := _others(folder, {SINGLE}):
        raise CheckpointError(f"{folder}: {extra[0]} lies beside {SINGLE}; remove one of them")
    return _header(folder / SINGLE)


def _sharded(folder: Path) -> dict[str, Stored]:
    """Tensors of several files; the index and the files must tell the same."""
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{folder / INDEX}: has no weight_map of names to files")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or not name.isprintable():
            raise CheckpointError(f"{folder / INDEX}: {name!r} is not a file name")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: shard {name} is missing, which {INDEX} lists")
    if extra := _others(folder, set(names)):
        raise CheckpointError(f"{folder}: {extra[0]} is not listed in {INDEX}; remove one of them")
    tensors: dict[str, Stored] = {}
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


def _others(folder: Path, known: set[str]) -> list[str]:
    """Weights that would be left out: a shard of another version, or an adapter."""
    there = {file.name for file in folder.glob("*.safetensors")}
    return sorted(name for name in there - known if not name.startswith(_SECOND_COPY))


def _header(file: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file. The library checks that the header fits the file."""
    try:
        with safetensors.safe_open(file, framework="np"):
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LONGEST_HEADER:
                raise CheckpointError(f"{file}: the header's length {length} is not possible")
            header = parse_json(stream.read(length))
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read ({exc.strerror or exc})") from exc
    except (safetensors.SafetensorError, ValueError, RecursionError) as exc:
        raise CheckpointError(
            f"{file}: the safetensors header is damaged or the file cut short ({printable(exc)}); "
            "fetch the file again"
        ) from exc
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: Stored(
            file,
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
            start + entry["data_offsets"][1],
        )
        for name, entry in header.items()
    }
