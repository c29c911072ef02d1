"""Logprobs in OpenAI's two shapes: chat's list of objects, and the older parallel lists."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ortolan.runtime.params import PositionLogprobs, TokenLogprob
from ortolan.runtime.text.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI sends for a token that cannot come.
_LOWEST = -9999.0

Positions = Sequence[tuple[int, PositionLogprobs | None]]


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Of an answer's tokens in order; `bytes` are exact where `token` has a replacement."""
    content = [
        {
            **_entry(position.chosen),
            "top_logprobs": [_entry(token) for token in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.bytes.decode("utf-8", "replace"),
        "logprob": max(token.logprob, _LOWEST),
        "bytes": list(token.bytes),
    }


class CompletionLogprobs:
    """One answer's logprobs in the older shape, piece by piece.

    top: whether the likeliest are listed. text_offset counts characters from where the text
    begins, which is the prompt's first with echo.
    """

    def __init__(self, tokenizer: Tokenizer, *, top: bool, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, positions: Positions) -> dict[str, Any]:
        """The next tokens' (id, logprobs); a prompt's first token has None."""
        offsets = []
        for token_id, _ in positions:
            offsets.append(self._advance(self._tokenizer.token_bytes(token_id)))
        return {
            "text_offset": offsets,
            "token_logprobs": [
                None if found is None else max(found.chosen.logprob, _LOWEST)
                for _, found in positions
            ],
            "tokens": [
                _spelled(self._tokenizer.token_bytes(token_id, special=True))
                for token_id, _ in positions
            ],
            "top_logprobs": [_likeliest(found) for _, found in positions] if self._top else None,
        }

    def _advance(self, token: bytes) -> int:
        """Where the token's first character begins; special tokens are no part of the text."""
        pending = self._decoder.getstate()[0]
        if token and pending and not _goes_on(pending + token[:1]):
            self._offset += len(self._decoder.decode(b"", final=True))  # a replacement character
        begins = self._offset
        self._offset += len(self._decoder.decode(token))
        return begins


def _goes_on(character: bytes) -> bool:
    """Whether these are the bytes of one character, or the first of them."""
    try:
        character.decode()
    except UnicodeDecodeError as exc:
        return exc.reason == "unexpected end of data"
    return True


def _likeliest(found: PositionLogprobs | None) -> dict[str, float] | None:
    """Spelling -> logprob, the token that stands there included."""
    if found is None:
        return None
    entries: dict[str, float] = {}
    for token in (*found.top, found.chosen):
        entries.setdefault(_spelled(token.bytes), max(token.logprob, _LOWEST))
    return entries


def _spelled(token: bytes) -> str:
    r"""A token's text; a part of a character as OpenAI spells it, "bytes:\xe2\x82"."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
