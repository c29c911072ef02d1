"""The tokenizers library's call that turns text into ids."""

from __future__ import annotations

import tokenizers

# The library's plain call keeps Python's lock: a text of megabytes would halt every other thread,
# streams included, for seconds. Its call for batches does not, but starts threads of its own and
# warns after a fork, which short texts (a few milliseconds) are not worth.
_LONG = 4096  # characters


def ids_of(library: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids of valid Unicode, nothing added. Other threads run meanwhile, if `text` is long."""
    if len(text) < _LONG:
        short: list[int] = library.encode(text, add_special_tokens=False).ids
        return short
    ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
