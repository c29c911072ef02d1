"""What stands in for the tokenizer of a bundle that has none: token ids in, token ids out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import tokenizers

from ortolan.errors import RequestError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.text.markers import RenderedChat
from ortolan.runtime.text.tokenizer import Tokenizer, read_generation_config


class NoTokenizer(Tokenizer):
    """No token has any bytes, so answers have no text; every id of the model is valid."""

    def __init__(self, generation: Mapping[str, Any] | None = None) -> None:
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.decoder = tokenizers.decoders.ByteLevel()  # of nothing
        super().__init__(library, generation)
        self.vocab_size = sys.maxsize

    @classmethod
    def open(cls, path: Path) -> NoTokenizer:
        """Read a bundle's folder, of which only generation_config.json says something."""
        return cls(read_generation_config(path / "generation_config.json"))

    def encode(self, text: str) -> NoReturn:
        """Raises RequestError."""
        raise no_text()

    def encode_chat(self, rendered: RenderedChat) -> NoReturn:
        """Raises RequestError."""
        raise no_text()

    def decode(self, ids: Iterable[int]) -> str:
        return ""


def open_tokenizer(bundle: Bundle) -> Tokenizer:
    """The bundle's tokenizer, or the stand-in. Raises BundleError if its files are damaged."""
    if "tokenizer.json" in bundle.manifest.files:
        return Tokenizer.open(bundle.path)
    return NoTokenizer.open(bundle.path)


def no_text() -> RequestError:
    """The error for everything that would need a tokenizer."""
    return RequestError("this bundle has no tokenizer; give token ids")
