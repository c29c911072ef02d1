"""The text that weights are calibrated on, as windows of token ids."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from ortolan.errors import CheckpointError, UsageError

_WINDOW = 512  # tokens that are read together
_MOST_TOKENS = 32 * _WINDOW
_FEWEST_TOKENS = 1024
_MOST_BYTES = 8 << 20  # of a file that are looked at


def calibration_text(path: Path | None) -> str:
    """The text at `path`, or the one that is shipped: our own words, English, code and others.

    Of a file of more than 8 MiB the first are read. Raises UsageError if there is no such file or
    it is not UTF-8 text.
    """
    if path is None:
        return (resources.files("ortolan.export") / "calibration.txt").read_text(encoding="utf-8")
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
            # A character that the limit cuts in two is no fault of the file's.
            whole = not file.read(1)
        return data.decode("utf-8", "strict" if whole else "ignore")
    except OSError as error:
        raise UsageError(
            f"--calibrate {path}: cannot be read ({error.strerror}); "
            "give a text file, or leave it out for the text that is shipped"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--calibrate {path}: not UTF-8 text (byte {error.start}); convert it, "
            "or leave it out for the text that is shipped"
        ) from error


def calibration_windows(
    text: str, texts: Mapping[str, bytes], max_context: int, vocab_size: int, name: str
) -> npt.NDArray[np.int64]:
    """Token ids [windows, chunk] of a text, by the tokenizer among a bundle's `texts`.

    Each window begins with the tokens that the tokenizer puts before a text, if any. At most
    32 windows of 512 tokens, or more of fewer, evenly spread over a longer text.
    Raises CheckpointError without a tokenizer, UsageError if the text, called `name`, is too short.
    """
    if "tokenizer.json" not in texts:
        raise CheckpointError(
            "weights cannot be calibrated, nor made w8a8: the checkpoint has no tokenizer to read "
            "a text with; add its tokenizer.json, or leave out --calibrate, w8a8 and their presets"
        )
    library = tokenizers.Tokenizer.from_str(texts["tokenizer.json"].decode())
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # what spells a control token is text
    ids = library.encode(text, add_special_tokens=False).ids
    first = _begin(library)
    chunk = min(_WINDOW, max_context)
    own = chunk - len(first)
    count = len(ids) // own if own > 0 else 0
    if len(ids) < _FEWEST_TOKENS or not count:
        raise UsageError(
            f"{name} is too short to calibrate with: it has {len(ids)} tokens, and "
            f"{_FEWEST_TOKENS} are the fewest; give a longer one"
        )
    if max(ids) >= vocab_size:
        raise CheckpointError(
            f"the tokenizer gives id {max(ids)} for {name}, but the model has {vocab_size} ids; "
            "fetch the checkpoint again"
        )
    windows = np.array(ids[: count * own], np.int64).reshape(count, own)
    chosen = np.unique(
        np.linspace(0, count - 1, min(count, _MOST_TOKENS // chunk)).round().astype(int)
    )
    windows = windows[chosen]
    before = np.broadcast_to(np.array(first, np.int64), (len(windows), len(first)))
    return np.concatenate([before, windows], axis=1)


def _begin(library: tokenizers.Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before a text."""
    plain = library.encode("a", add_special_tokens=False).ids
    ids: list[int] = library.encode("a").ids
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    return []
