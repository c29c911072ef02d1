"""Tokenizer, template and generation settings of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path


def hf_texts(folder: Path) -> dict[str, bytes]:
    """The files of a bundle that concern text, by name."""
    names = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
