"""A tokenizer in which no text can spell a control token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from ortolan.errors import BundleError
from ortolan.runtime.text.library import ids_of


class RenamedTokenizer:
    """A copy of a tokenizer whose markers have names that nobody can type.

    Text is cut as before, except that a marker is a marker only where `rename` put its name.
    Making one takes as long as opening a tokenizer, so it is made when first needed.
    """

    def __init__(self, library: tokenizers.Tokenizer, markers: Mapping[str, int]) -> None:
        """`markers`: spelling -> id. Raises BundleError if the copy gives them other ids."""
        nonce = secrets.token_hex(8)
        self._names = {text: f"\ue000{nonce}.{index}\ue001" for text, index in markers.items()}
        document = json.loads(library.to_str())
        self._rename_in(document)
        self._library = tokenizers.Tokenizer.from_str(json.dumps(document))
        for text, index in markers.items():
            if self._library.token_to_id(self._names[text]) != index:
                raise BundleError(
                    f"tokenizer.json gives no stable id to its token {text!r}, so text that "
                    "spells it cannot be told from the token; export the bundle again"
                )

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without BOS or EOS."""
        return ids_of(self._library, text)

    def rename(self, text: str, spans: Iterable[tuple[int, int]]) -> str:
        """`text` with the markers at `spans` (start, end; ascending) renamed."""
        pieces, done = [], 0
        for start, end in spans:
            pieces += [text[done:start], self._names[text[start:end]]]
            done = end
        return "".join(pieces) + text[done:]

    def _rename_in(self, document: dict[str, Any]) -> None:
        names, model = self._names, document["model"]
        for added in document["added_tokens"]:
            if added["content"] in names:
                added["content"] = names[added["content"]]
                added["single_word"] = False  # a name has no word boundary
        # The model may list markers too, and make them of parts or take a whole word for one.
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
        else:  # a Unigram model's pairs of token and score
            model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
        if "merges" in model:
            model["merges"] = [
                (left, right)
                for left, right in model["merges"]
                if names.keys().isdisjoint((left, right, left + right))
            ]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
