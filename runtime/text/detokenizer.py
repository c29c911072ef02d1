"""Text that grows token by token, never by half a character."""

from __future__ import annotations

import codecs

from ortolan.runtime.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one answer's ids into text as they come, in constant time per token.

    All that `push` and `flush` return, joined, is `tokenizer.decode` of all ids. With
    `continues`, the text goes on from a prompt, and the leading space that decoding a
    SentencePiece text takes away is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space and not continues

    def push(self, token_id: int) -> str:
        """The characters that this token completes; empty while one is incomplete."""
        return self._stripped(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """What was held back, at the end of an answer: U+FFFD for an incomplete character."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
