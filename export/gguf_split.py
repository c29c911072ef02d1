"""A GGUF model in several files: which they are, and that they are all there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortolan.errors import CheckpointError

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def split_count(path: Path, metadata: Mapping[str, Any]) -> int:
    """How many files the model of this one is split into. Raises CheckpointError for nonsense."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 99999:
        raise CheckpointError(f"{path}: split.count is {count!r:.40}; fetch the file again")
    return max(count, 1)


def split_paths(path: Path, count: int) -> list[Path]:
    """All files of a split model, in order, from any one of them.

    Raises CheckpointError naming the first that is missing.
    """
    found = _NAME.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} files that make a model; they are found by their names, "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    paths = []
    for number in range(1, count + 1):
        part = path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise CheckpointError(
                f"{part}: is missing, number {number} of {count} files that make a model; "
                f"put it beside {path.name}"
            )
        paths.append(part)
    return paths


def check_part(path: Path, index: int, count: int, metadata: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a file is not the part that its name says."""
    found = metadata.get("split.no"), metadata.get("split.count")
    if found != (index, count):
        raise CheckpointError(
            f"{path}: its name says part {index + 1} of {count}, its split.no and split.count are "
            f"{found[0]!r:.40} and {found[1]!r:.40}; fetch the file again"
        )
