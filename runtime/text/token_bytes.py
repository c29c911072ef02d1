"""The exact bytes that each token stands for, which the tokenizers library does not tell."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import tokenizers

from ortolan.errors import BundleError

SPACE = "\u2581"  # what SentencePiece writes for a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SENTENCEPIECE_STEPS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    STRIP,
]


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*printable, *range(0x100, 0x100 + len(others))]
    return {chr(code): byte for code, byte in zip(characters, printable + others, strict=True)}


BYTE_OF_CHARACTER = _byte_of_character()


class TokenBytes:
    """Bytes by token id, for byte-level BPE and for SentencePiece with byte fallback.

    strips_leading_space: decoding takes away the space that SentencePiece puts before a text.
    Raises BundleError for a tokenizer.json that decodes in another way.
    """

    def __init__(self, library: tokenizers.Tokenizer, added: Collection[int]) -> None:
        """`added`: ids of added tokens, which byte-level BPE spells in plain characters."""
        self._library = library
        self._added = frozenset(added)
        self._found: dict[int, bytes] = {}
        decoder = library.decoder
        state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder else {"type": None}
        steps: list[dict[str, Any]] = state.get("decoders", [state])
        self._byte_level = all(step["type"] == "ByteLevel" for step in steps)
        self.strips_leading_space = STRIP in steps
        unknown = [step for step in steps if step not in SENTENCEPIECE_STEPS]
        if unknown and not self._byte_level:
            raise BundleError(
                f"tokenizer.json has the decoder step {json.dumps(unknown[0])}, and only ByteLevel "
                "and SentencePiece's steps can be streamed; use a checkpoint with one of these"
            )

    def __call__(self, token_id: int) -> bytes:
        """Empty for ids that do not exist."""
        found = self._found.get(token_id)
        if found is None:
            token = self._library.id_to_token(token_id) if token_id >= 0 else None
            if token is None:
                return b""
            found = self._found[token_id] = self._bytes(token_id, token)
        return found

    def _bytes(self, token_id: int, token: str) -> bytes:
        if not self._byte_level:
            match = BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode()
        if token_id in self._added or not BYTE_OF_CHARACTER.keys() >= set(token):
            return token.encode()
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
