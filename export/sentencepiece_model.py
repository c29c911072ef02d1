"""A SentencePiece model file (tokenizer.model) as the key-value metadata that GGUF has for one.

The file is a protocol buffer, of which only a few fields matter here; they are read without the
sentencepiece package. Source: google/sentencepiece, src/sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.tokenizer import PREFIX

_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_MOST_PIECES = 1 << 20
_LONGEST_FILE = 64 << 20

# Field numbers: of ModelProto, then of the messages within it.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX, _UNK_ID, _BOS_ID, _EOS_ID, _PAD_ID = 3, 24, 40, 41, 42, 43
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5

Fields = Mapping[int, list[Any]]  # integers, floats, or bytes of what lies within


def sentencepiece_metadata(path: Path) -> dict[str, object]:
    """Tokens, scores, types and special ids under GGUF's keys.

    Raises CheckpointError for a damaged file, and ConfigError for a model that is not BPE or
    changes text before it is cut.
    """
    try:
        if path.stat().st_size > _LONGEST_FILE:
            raise ValueError(f"more than {_LONGEST_FILE >> 20} MiB")
        model = _fields(path.read_bytes())
        pieces = [_fields(piece) for piece in model.get(_PIECE, [])]
        trainer, normalizer = (_fields(_last(model, key, b"")) for key in (_TRAINER, _NORMALIZER))
        if not 0 < len(pieces) <= _MOST_PIECES:
            raise ValueError(f"{len(pieces)} pieces")
        tokens = [_last(piece, _TEXT, b"").decode() for piece in pieces]
        scores = [float(_last(piece, _SCORE, 0.0)) for piece in pieces]
        types = [int(_last(piece, _TYPE, 1)) for piece in pieces]
    except (ValueError, TypeError, AttributeError, struct.error) as exc:
        raise CheckpointError(
            f"{path}: is no SentencePiece model ({exc}); fetch the file again"
        ) from exc
    _check(path, trainer, normalizer)
    metadata: dict[str, object] = {
        f"{PREFIX}model": "llama",
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}scores": scores,
        f"{PREFIX}token_type": types,
        f"{PREFIX}add_space_prefix": bool(_last(normalizer, _DUMMY_PREFIX, 1)),
    }
    defaults = (("unknown", _UNK_ID, 0), ("bos", _BOS_ID, 1), ("eos", _EOS_ID, 2))
    for name, key, default in (*defaults, ("padding", _PAD_ID, -1)):
        index = _signed(_last(trainer, key, default))
        if 0 <= index < len(tokens):
            metadata[f"{PREFIX}{name}_token_id"] = index
    return metadata


def _check(path: Path, trainer: Fields, normalizer: Fields) -> None:
    """What the conversion to BPE merges does not express is refused by name."""
    kind = _last(trainer, _MODEL_TYPE, 1)
    if kind != 2:
        raise ConfigError(
            f"{path}: model_type is {_MODEL_TYPES.get(kind, kind)!r}, which cannot be converted; "
            "known is 'bpe'. A tokenizer.json would do"
        )
    for name, given in (
        ("precompiled_charsmap", bool(_last(normalizer, _CHARSMAP, b""))),
        ("remove_extra_whitespaces", bool(_last(normalizer, _REMOVE_SPACES, 1))),
        ("no escape_whitespaces", not _last(normalizer, _ESCAPE_SPACES, 1)),
        ("treat_whitespace_as_suffix", bool(_last(trainer, _SPACE_AS_SUFFIX, 0))),
    ):
        if given:
            raise ConfigError(
                f"{path}: changes text by {name}, which cannot be converted; "
                "a tokenizer.json would do"
            )


def _last(fields: Fields, key: int, default: Any) -> Any:
    """In a protocol buffer, the last value of a single field counts."""
    return fields.get(key, [default])[-1]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> dict[int, list[Any]]:
    """A message's values by field number. Raises ValueError if it does not end where it says."""
    found: dict[int, list[Any]] = {}
    for key, value in _walk(data):
        found.setdefault(key, []).append(value)
    return found


def _walk(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        key, wire = tag >> 3, tag & 7
        value: Any
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 5:
            (value,), at = struct.unpack_from("<f", data, at), at + 4
        elif wire == 1:
            (value,), at = struct.unpack_from("<d", data, at), at + 8
        elif wire == 2:
            length, at = _varint(data, at)
            if length > len(data) - at:
                raise ValueError("cut short")
            value, at = data[at : at + length], at + length
        else:
            raise ValueError(f"wire type {wire}")
        yield key, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("cut short")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")
