"""A checkpoint's tensors against those that its model has: none missing, none left over."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ortolan.errors import CheckpointError, ConfigError


def check_names(
    where: str | Path, wanted: Collection[str], found: Collection[str], *, hint: str
) -> None:
    """Raises CheckpointError for a missing tensor, ConfigError for an unknown one, by its name.

    hint: what a missing tensor says about a checkpoint of this kind.
    """
    if missing := sorted(set(wanted) - set(found)):
        raise CheckpointError(
            f"{where}: tensor {missing[0]} is missing ({len(missing)} in all); {hint}"
        )
    if extra := sorted(set(found) - set(wanted)):
        raise ConfigError(
            f"{where}: tensor {extra[0]} is unknown ({len(extra)} in all); "
            "leaving it out would change the model"
        )
