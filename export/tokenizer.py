"""A GGUF file's vocabulary, written as the files that a bundle holds.

GGUF keeps tokens, merges or scores, and the name of a pre-tokenizer under `tokenizer.*` keys.
A bundle holds the same as tokenizer.json, which the tokenizers library reads. Two families are
known: byte-level BPE (`gpt2`, with the pre-tokenizers in PRE_TOKENIZERS) and SentencePiece BPE
(`llama`). Anything else is refused by name: a nearly right tokenizer fails in silence.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ortolan.errors import CheckpointError, ConfigError

PREFIX = "tokenizer.ggml."
DAMAGED = "the file is damaged: fetch or convert it again"
SPACE = "\u2581"  # what SentencePiece writes for a space


class TokenType(IntEnum):
    """What GGUF says of each token; the numbers are SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4  # matched in raw text before anything else, but not hidden from output
    UNUSED = 5  # padding of the embedding table
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before byte-level BPE.

    pattern: words, as a regular expression; None takes GPT-2's, which is built into ByteLevel.
    single_digits: digits are cut apart first.
    ignore_merges: a word that is itself a token is taken whole, whatever the merges say.
    add_bos: what holds where the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


# Llama 3 and Qwen 2 differ in how many digits stay together.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = PreTokenizer(_PATTERN.format(digits=r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(_PATTERN.format(digits=r"\p{N}")),
}


def tokenizer_files(metadata: Mapping[str, object]) -> dict[str, bytes]:
    """The files of a bundle that concern text, by name, from a GGUF file's key-value metadata.

    Always tokenizer.json and generation_config.json; chat_template.jinja where there is one.
    Raises ConfigError for a tokenizer or pre-tokenizer that we cannot express exactly, and
    CheckpointError for metadata that is missing or contradicts itself.
    """
    vocab = _Vocabulary.read(metadata)
    family = metadata.get(PREFIX + "model")
    if family == "gpt2":
        tokenizer = _byte_level_bpe(metadata, vocab)
    elif family == "llama":
        tokenizer = _sentencepiece_bpe(metadata, vocab)
    else:
        raise ConfigError(
            f"{PREFIX}model is {family!r}, which cannot be converted; known are 'gpt2' and 'llama'"
        )
    files = {
        "tokenizer.json": _json(tokenizer),
        "generation_config.json": _json(vocab.generation_config(), indent=2),
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template.encode()
    return files


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id, and which ids have a part to play. `eos`: every id that ends an answer."""

    tokens: Sequence[str]
    types: Sequence[int]
    bos: int | None
    eos: tuple[int, ...]
    unknown: int | None
    padding: int | None

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> _Vocabulary:
        tokens = _list(metadata, "tokens", str)
        types = _list(metadata, "token_type", int, default=[TokenType.NORMAL] * len(tokens))
        _check_length("token_type", types, tokens)

        def token_id(key: str) -> int | None:
            value = metadata.get(f"{PREFIX}{key}_token_id")
            if value is None:
                return None
            if not isinstance(value, int) or not 0 <= value < len(tokens):
                raise CheckpointError(
                    f"{PREFIX}{key}_token_id is {value!r}, but there are {len(tokens)} tokens; "
                    + DAMAGED
                )
            return value

        ends = (token_id(key) for key in ("eos", "eot", "eom"))
        return cls(
            tokens=tokens,
            types=types,
            bos=token_id("bos"),
            eos=tuple(dict.fromkeys(end for end in ends if end is not None)),
            unknown=token_id("unknown"),
            padding=token_id("padding"),
        )

    def ids(self, keep_unused: Collection[str] = ()) -> dict[str, int]:
        """Token -> id. The first of two equal tokens counts; unused ones go, unless kept."""
        ids: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != TokenType.UNUSED or token in keep_unused or index in (self.bos, *self.eos):
                ids.setdefault(token, index)
        return ids

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens matched in raw text; the special ones are hidden from output."""
        always = {self.bos, *self.eos}
        added = []
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or index in always
            if special or kind == TokenType.USER_DEFINED:
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                added.append({"id": index, "content": token, **flags, "special": special})
        return added

    def generation_config(self) -> dict[str, int | list[int]]:
        config: dict[str, int | list[int]] = {}
        if self.bos is not None:
            config["bos_token_id"] = self.bos
        if self.eos:
            config["eos_token_id"] = self.eos[0] if len(self.eos) == 1 else list(self.eos)
        if self.padding is not None:
            config["pad_token_id"] = self.padding
        return config


def _byte_level_bpe(metadata: Mapping[str, object], vocab: _Vocabulary) -> dict[str, Any]:
    name = metadata.get(PREFIX + "pre", "")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        # llama.cpp reads an unnamed one as "default" and warns that quality suffers.
        raise ConfigError(
            f"{PREFIX}pre is {name!r}, which cannot be converted; known are "
            f"{', '.join(map(repr, PRE_TOKENIZERS))}"
        )
    pre = PRE_TOKENIZERS[name]
    merges = _list(metadata, "merges", str)
    ids = vocab.ids(keep_unused={merge.replace(" ", "") for merge in merges})
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            raise CheckpointError(
                f"{PREFIX}merges has {merge!r}, but one of the two or what they make is not in "
                f"{PREFIX}tokens; {DAMAGED}"
            )

    def byte_level(words: bool) -> dict[str, Any]:
        flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": words}
        return {"type": "ByteLevel", **flags}

    steps: list[dict[str, Any]] = []
    if pre.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if pre.pattern is not None:
        split = {"pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False}
        steps.append({"type": "Split", **split})
    steps.append(byte_level(words=pre.pattern is None))
    return _tokenizer(
        metadata,
        vocab,
        add_bos=pre.add_bos,
        normalizer=None,  # llama.cpp has none for this family, and no key names one
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder=byte_level(words=True),
        model={"vocab": ids, "merges": merges, "ignore_merges": pre.ignore_merges},
    )


def _sentencepiece_bpe(metadata: Mapping[str, object], vocab: _Vocabulary) -> dict[str, Any]:
    scores = _list(metadata, "scores", float)
    _check_length("scores", scores, vocab.tokens)
    ids = vocab.ids()
    space = {"pattern": {"String": " "}, "content": SPACE}
    normalizers: list[dict[str, Any]] = [{"type": "Replace", **space}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if _flag(metadata, "add_space_prefix", default=True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        metadata,
        vocab,
        add_bos=True,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model={
            "vocab": ids,
            "merges": _merges_by_score(vocab, ids, scores),
            "unk_token": vocab.tokens[vocab.unknown or 0],
            "fuse_unk": True,
            "byte_fallback": all(f"<0x{byte:02X}>" in ids for byte in range(256)),
        },
    )


def _merges_by_score(
    vocab: _Vocabulary, ids: Mapping[str, int], scores: Sequence[float]
) -> list[str]:
    """Every way to make a token out of two others, best first, as "left right".

    SentencePiece joins whichever neighbours make the token of the highest score, so each split
    of a token has that token's rank. Control, unknown and byte tokens never come from text, nor
    does a token with a space, since text has SPACE instead.
    """
    from_text = (TokenType.NORMAL, TokenType.USER_DEFINED)
    usable = {
        token: index
        for token, index in ids.items()
        if vocab.types[index] in from_text and " " not in token
    }
    merges = []
    for token in sorted(usable, key=lambda token: (-scores[usable[token]], usable[token])):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                merges.append(f"{left} {right}")
    return merges


def _tokenizer(
    metadata: Mapping[str, object],
    vocab: _Vocabulary,
    *,
    add_bos: bool,
    model: Mapping[str, Any],
    **parts: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """tokenizer.json as a dictionary; `model` and `parts` hold what the families differ in."""
    bos = _added_id(metadata, "bos", vocab.bos, default=add_bos)
    eos = _added_id(metadata, "eos", next(iter(vocab.eos), None), default=False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocab.added_tokens(),
        **parts,
        "post_processor": _around(vocab, bos, eos),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **model,
        },
    }


def _added_id(
    metadata: Mapping[str, object], name: str, token_id: int | None, *, default: bool
) -> int | None:
    """The id of BOS or EOS if texts get one, else None."""
    if not _flag(metadata, f"add_{name}_token", default=default):
        return None
    if token_id is None:
        raise CheckpointError(
            f"texts are to begin or end with a token, but {PREFIX}{name}_token_id is missing; "
            + DAMAGED
        )
    return token_id


def _around(vocab: _Vocabulary, bos: int | None, eos: int | None) -> dict[str, Any] | None:
    """What puts BOS before and EOS after a text; None when neither is wanted."""
    used = {index: vocab.tokens[index] for index in (bos, eos) if index is not None}
    if not used:
        return None
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    before, after = (
        [{"SpecialToken": {"id": used[index], "type_id": 0}}] if index is not None else []
        for index in (bos, eos)
    )
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, second, *after],
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]} for index, token in used.items()
        },
    }


def _check_length(key: str, values: Sequence[object], tokens: Sequence[str]) -> None:
    if len(values) != len(tokens):
        raise CheckpointError(
            f"{PREFIX}{key} has {len(values)} entries and {PREFIX}tokens {len(tokens)}; {DAMAGED}"
        )


def _list(
    metadata: Mapping[str, object], key: str, kind: type, default: list[Any] | None = None
) -> list[Any]:
    values = metadata.get(PREFIX + key, default)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        found = "missing" if values is None else f"not a list of {kind.__name__}"
        raise CheckpointError(
            f"{PREFIX}{key} is {found}, so the tokenizer cannot be converted; {DAMAGED}"
        )
    return values


def _flag(metadata: Mapping[str, object], key: str, *, default: bool) -> bool:
    return bool(metadata.get(PREFIX + key, default))


def _json(value: object, indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else None
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators).encode()
