"""JSON files of a checkpoint, read with limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ortolan.errors import CheckpointError

_LONGEST_JSON = 64 << 20  # the largest tokenizer.json that we know of has 35 MB


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file, also for a key that is there twice."""
    try:
        if path.stat().st_size > _LONGEST_JSON:
            raise CheckpointError(
                f"{path}: has more than {_LONGEST_JSON >> 20} MiB for a JSON file"
            )
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: has no {path.name}; give the folder of a Hugging Face checkpoint"
        ) from None
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read ({exc.strerror})") from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(
            f"{path}: is no JSON ({printable(exc)}); fetch the file again"
        ) from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object; fetch the file again")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`, with an empty object for a file that does not exist."""
    return read_json(path) if path.exists() else {}


def parse_json(data: bytes) -> Any:
    """Raises ValueError or RecursionError for what is no JSON or has a key twice."""
    return json.loads(data, object_pairs_hook=_once)


def printable(error: Exception) -> str:
    """What an error says, without control characters and in 200 of them."""
    return ascii(str(error))[1:-1][:200]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    for key in values:
        if not key.isprintable():  # it would reach a terminal in some message
            raise ValueError(f"the key {key!r} is no name")
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return values
