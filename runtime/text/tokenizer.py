"""Text to token ids and back, from a bundle's tokenizer.json and generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ortolan.errors import BundleError, RequestError
from ortolan.runtime.text.library import ids_of
from ortolan.runtime.text.markers import Markers, RenderedChat
from ortolan.runtime.text.renamed import RenamedTokenizer
from ortolan.runtime.text.token_bytes import SPACE, TokenBytes

# This many absent ids in a row mean that the vocabulary is over.
LONGEST_HOLE = 1024


class Tokenizer:
    """A bundle's vocabulary. Opened once, then shared between threads.

    bos_id: the begin token; None if the model has none.
    eos_ids: every token that ends an answer.
    vocab_size: one past the largest id that exists; a model may have more logits than that.
    strips_leading_space: whether decoding takes away the space that SentencePiece puts first.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, generation: Mapping[str, Any] | None = None
    ) -> None:
        """`generation`: Hugging Face's generation_config.json, of which the ids are read."""
        library.no_truncation()  # some files carry the length of a training sample
        library.no_padding()
        added = library.get_added_tokens_decoder()
        self._library = library
        self._spelling = {index: token.content for index, token in added.items()}
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._marker_ids = self._special | {
            index for index, content in self._spelling.items() if _is_marker(content)
        }
        self._bytes = TokenBytes(library, added=added)
        self.strips_leading_space = self._bytes.strips_leading_space
        self.vocab_size = _vocab_size(library, max(added, default=-1) + 1)

        self._prefix, self._suffix = _surroundings(library)
        generation = generation or {}
        self.eos_ids = _token_ids(generation, "eos_token_id")
        self.bos_id = _first(_token_ids(generation, "bos_token_id") or self._prefix)
        self.pad_id = _first(_token_ids(generation, "pad_token_id"))

    @classmethod
    def open(cls, path: Path) -> Tokenizer:
        """Read a bundle's folder. Raises BundleError if its files are missing or damaged."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise BundleError(f"{path} has no tokenizer.json; export the bundle again")
        try:
            library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower type
            raise BundleError(f"{file} is damaged ({error}); export the bundle again") from error
        return cls(library, read_generation_config(path / "generation_config.json"))

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt: all of it is text, also where it spells a control token.

        BOS and EOS are added where tokenizer.json says so.
        Raises RequestError if `text` is not valid Unicode.
        """
        ids = self._encode(text)
        if not self._marker_ids.isdisjoint(ids):
            ids = self._renamed.encode(text)
        return [*self._prefix, *ids, *self._suffix]

    def encode_chat(self, rendered: RenderedChat) -> list[int]:
        """Ids of a rendered chat: the template's markers are control tokens, a user's are text.

        BOS is there exactly where the template wrote it.
        Raises RequestError if the text is not valid Unicode.
        """
        text = rendered.text
        ids = self._encode(text)
        if rendered.cuts:
            own = list(self.markers.spans(text, rendered.cuts))
            if own != list(self.markers.spans(text, ())):
                renamed = self._renamed
                ids = renamed.encode(renamed.rename(text, own))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out.

        Bytes that are not UTF-8 become U+FFFD as Unicode recommends, so that a text read token
        by token comes out the same.
        """
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """Exactly the bytes that a token stands for; they may be a part of a character.

        Empty for ids that do not exist, and for special tokens unless `special` is set: then
        their spelling.
        """
        if token_id in self._special and not special:
            return b""
        return self._bytes(token_id)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None if the id does not exist."""
        return self._library.id_to_token(token_id) if token_id >= 0 else None

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model and never shows in output."""
        return token_id in self._special

    @cached_property
    def markers(self) -> Markers:
        """Added tokens that a text must not be able to spell."""
        return Markers([self._spelling[index] for index in self._marker_ids])

    @cached_property
    def control_markers(self) -> Markers:
        """The markers that are special tokens: not, for instance, a thinking tag."""
        if self._special == self._marker_ids:
            return self.markers
        return Markers([self._spelling[index] for index in self._special])

    @cached_property
    def _renamed(self) -> RenamedTokenizer:
        markers = {self._spelling[index]: index for index in self._marker_ids}
        return RenamedTokenizer(self._library, markers)

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()  # the library's own complaint would be that this is no str
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds half a surrogate pair at character {error.start}, "
                "which is no character; send valid Unicode"
            ) from error
        return ids_of(self._library, text)


def _is_marker(content: str) -> bool:
    """Whether an added token has a meaning.

    Some vocabularies list runs of spaces and single letters as added tokens; those are text.
    """
    return len("".join(content.replace(SPACE, " ").split())) > 1


def _vocab_size(library: tokenizers.Tokenizer, at_least: int) -> int:
    # The whole vocabulary as a dictionary would take a fifth of the time of opening.
    size = max(library.get_vocab_size(), at_least)
    candidate = size
    while candidate < size + LONGEST_HOLE:
        if library.id_to_token(candidate) is not None:
            size = candidate + 1
        candidate += 1
    return size


def _surroundings(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that tokenizer.json's post-processor puts before and after a text."""
    text = library.encode("a", add_special_tokens=False).ids
    whole = library.encode("a").ids
    before = next(at for at in range(len(whole) + 1) if whole[at : at + len(text)] == text)
    return whole[:before], whole[before + len(text) :]


def _first(ids: Iterable[int]) -> int | None:
    return next(iter(ids), None)


def read_generation_config(file: Path) -> dict[str, Any]:
    """A bundle's generation_config.json; empty without one. Raises BundleError if damaged."""
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BundleError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is damaged ({error}); export the bundle again") from error
    if not isinstance(config, dict):
        raise BundleError(f"{file} holds no JSON object; export the bundle again")
    return config


def _token_ids(generation: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = generation.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(index) is not int or index < 0 for index in ids):
        raise BundleError(
            f"generation_config.json has {key} {value!r}, which is no token id or list of token "
            "ids; export the bundle again"
        )
    return tuple(ids)
