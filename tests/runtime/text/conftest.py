"""Two small vocabularies, one of each family that Ortolan reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from ortolan.runtime.text.tokenizer import Tokenizer

# The library's own alphabet, so that our table of bytes is compared with somebody else's.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL = ["<|begin|>", "<|end|>", "<|role|>", "MASK"]
PLAIN_ADDED = ["<think>", "</think>", "  "]
# U+00E9 is the bytes C3 A9, which byte-level BPE writes as these two characters.
MERGES = [("e", "n"), ("en", "d"), ("\u0120", "end"), ("\u00c3", "\u00a9"), ("o", "k")]

Document = dict[str, Any]
WriteBundle = Callable[..., Path]


def added_token(index: int, content: str, *, special: bool) -> Document:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, "special": special, **flags}


@pytest.fixture
def byte_level_document() -> Document:
    """tokenizer.json of a byte-level BPE: control tokens, bytes, merges, plain added tokens."""
    tokens = [*CONTROL, *ALPHABET, *(left + right for left, right in MERGES)]
    vocab = {token: index for index, token in enumerate(tokens)}
    added = [added_token(vocab[token], token, special=True) for token in CONTROL]
    added += [added_token(len(vocab) + i, t, special=False) for i, t in enumerate(PLAIN_ADDED)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        # ignore_merges, as Llama 3 has it: a word that is a token needs no merges.
        "model": {"type": "BPE", "vocab": vocab, "merges": MERGES, "ignore_merges": True},
    }


@pytest.fixture
def sentencepiece_document() -> Document:
    """tokenizer.json of a SentencePiece BPE with byte fallback and a leading space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "a", "b", "ab", "\u2581ab", "\u2581\u2581"]
    vocab = {token: index for index, token in enumerate(tokens)}
    space = "\u2581"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, tokens[i], special=True) for i in range(3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": space},
                {"type": "Replace", "pattern": {"String": " "}, "content": space},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": begin_with("<s>", 1),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": space}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [("a", "b"), (space, "ab"), (space, space)],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def begin_with(token: str, index: int) -> Document:
    """A post-processor that puts one token before every text."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


@pytest.fixture
def write_bundle(tmp_path: Path) -> WriteBundle:
    """Writes a tokenizer.json, and what else is given, into a bundle's folder."""

    def write(document: Document, generation: object = None, template: str | None = None) -> Path:
        (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def byte_level(write_bundle: WriteBundle, byte_level_document: Document) -> Tokenizer:
    generation = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 1}
    return Tokenizer.open(write_bundle(byte_level_document, generation))


@pytest.fixture
def sentencepiece(write_bundle: WriteBundle, sentencepiece_document: Document) -> Tokenizer:
    return Tokenizer.open(write_bundle(sentencepiece_document, {"eos_token_id": 2}))
