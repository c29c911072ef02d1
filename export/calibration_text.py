"""The text that statistics of a model are taken on: ours, and in no accuracy report."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import numpy as np
from tokenizers import Tokenizer

from ortolan.errors import UsageError
from ortolan.export.calibration import Ids

_WINDOW = 512  # tokens that are read as one context, at most


def calibration_windows(texts: Mapping[str, bytes], context: int, purpose: str) -> Ids:
    """Token ids [windows, chunk] of the shipped text, by the bundle's own tokenizer.

    texts: the bundle's text files. purpose: the option that needs them, for the message. Raises
    UsageError for a model without a tokenizer.
    """
    if "tokenizer.json" not in texts:
        raise UsageError(
            f"{purpose} reads a text to choose its scales, and this checkpoint has no tokenizer; "
            f"leave out {purpose}, or add a tokenizer to the checkpoint"
        )
    tokenizer = Tokenizer.from_buffer(texts["tokenizer.json"])
    text = (resources.files("ortolan.export") / "calibration.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text).ids
    # As long as they may be and of one length: what is left over is less than a token each.
    count = -(-len(ids) // min(_WINDOW, context))
    chunk = len(ids) // count
    return np.array(ids[: count * chunk], np.int64).reshape(count, chunk)
