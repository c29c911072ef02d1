"""A checkpoint by its name on the Hugging Face Hub.

huggingface_hub downloads, resumes, caches and shows progress; here is only what to fetch, and what
its errors come down to. It is imported when a name is really fetched.
"""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import CheckpointError
from ortolan.optional import require

# What a bundle is made from. No pattern matches pickled weights, or copies in other formats.
_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",  # only to say that it is not enough
    "chat_template.jinja",
    "chat_template.json",
)
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ID = re.compile(rf"(?P<name>{_WORD}/{_WORD})(@(?P<revision>[^\s@:]+))?(:(?P<file>[^\s:]+\.gguf))?")
_OF_FILES = (".gguf", ".safetensors", ".json", ".bin", ".onnx")


@dataclass(frozen=True)
class HubId:
    """`org/name[@revision][:file.gguf]`. revision: a branch, a tag or a commit."""

    name: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, source: str) -> HubId | None:
        """None for what is no such id, or more likely the name of a file."""
        match = _ID.fullmatch(source)
        if match is None or match["name"].endswith(_OF_FILES):
            return None
        return cls(match["name"], match["revision"], match["file"])

    def __str__(self) -> str:
        return self.name + (f"@{self.revision}" if self.revision else "")


def fetch(hub_id: HubId) -> Path:
    """The folder, or the GGUF file, in the cache of huggingface_hub; what is missing is fetched.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to that library. Where a
    connection breaks, the file goes on from there; after a killed run, files that were whole are
    kept. Progress is shown on a terminal only.
    Raises CheckpointError if the repository cannot be reached, is not there, asks for permission,
    or holds no weights that we read.
    """
    require("huggingface_hub", "export", "fetching a checkpoint by its name")
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    shown = os.isatty(2) and "NO_COLOR" not in os.environ
    quiet = nullcontext() if shown else disable_progress_bars()
    try:
        with quiet:
            folder = Path(
                huggingface_hub.snapshot_download(
                    hub_id.name,
                    revision=hub_id.revision,
                    allow_patterns=[hub_id.file] if hub_id.file else list(_FILES),
                    ignore_patterns=None if hub_id.file else ["*/*"],
                    library_name="ortolan",
                )
            )
    except Exception as error:  # errors of httpx, of the Hub and of the disk
        raise _refusal(hub_id, error) from error
    wanted = hub_id.file or "config.json"
    if not (folder / wanted).is_file():
        raise CheckpointError(f"{hub_id}: this repository of the Hub has no {wanted}")
    if hub_id.file is None and not any(folder.glob("model*.safetensors")):
        raise CheckpointError(
            f"{hub_id}: this repository of the Hub has no safetensors, and only they are read"
        )
    return folder / hub_id.file if hub_id.file else folder


def _refusal(hub_id: HubId, error: Exception) -> CheckpointError:
    """One sentence for an error of huggingface_hub."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        why = (
            "the Hub gives it only to those who accepted its terms; accept them on its page, then "
            "set HF_TOKEN or run: hf auth login"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        why = f"the Hub has this repository, but no revision {hub_id.revision!r}"
    elif isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        why = (
            "no such file here, and no such repository on the Hub; if it is private, set HF_TOKEN "
            "or run: hf auth login"
        )
    elif isinstance(error, errors.HFValidationError):
        why = "no such file here, and no valid name on the Hub"
    elif constants.HF_HUB_OFFLINE:
        why = "it is not in the cache as a whole, and HF_HUB_OFFLINE forbids to fetch it"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        why = (
            f"no such file here, and the Hub ({constants.ENDPOINT}) cannot be reached; "
            "check the network, or copy the checkpoint here"
        )
    else:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        why = f"the download stopped ({first}); the same command keeps the files that are whole"
    return CheckpointError(f"{hub_id}: {why}")
