"""tokenizer.json for a Hugging Face folder that has only tokenizer.model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.hf_json import read_json_if_there
from ortolan.export.sentencepiece_model import sentencepiece_metadata
from ortolan.export.tokenizer import PREFIX, SPACE, TokenType, tokenizer_files

# Classes of transformers that are a plain SentencePiece model with Llama's defaults.
_CLASSES = (None, "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast")
_FLAGS = ("single_word", "lstrip", "rstrip")


def slow_tokenizer(folder: Path, config: Mapping[str, Any]) -> bytes:
    """tokenizer.json as transformers would make it, from tokenizer.model and tokenizer_config.json.

    Raises CheckpointError for damaged files, ConfigError for what cannot be converted exactly.
    """
    kind = config.get("tokenizer_class")
    if kind not in _CLASSES:
        raise ConfigError(
            f"{folder}: tokenizer_class {kind!r} cannot be converted; a tokenizer.json would do"
        )
    metadata = sentencepiece_metadata(folder / "tokenizer.model")
    metadata[f"{PREFIX}add_bos_token"] = _switch(folder, config, "add_bos_token", True)
    metadata[f"{PREFIX}add_eos_token"] = _switch(folder, config, "add_eos_token", False)
    if not _switch(folder, config, "add_prefix_space", True):
        metadata[f"{PREFIX}add_space_prefix"] = False
    _add_tokens(folder, config, metadata)
    data = tokenizer_files(metadata)["tokenizer.json"]
    if _switch(folder, config, "legacy", True) or not metadata[f"{PREFIX}add_space_prefix"]:
        return data
    # Not legacy: only the text's beginning gets a space, not what follows a control token.
    tokenizer = json.loads(data)
    tokenizer["normalizer"] = None
    tokenizer["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "first",
        "split": False,
    }
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode()


def _switch(folder: Path, config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{folder}/tokenizer_config.json: {key} is {value!r}, no true or false"
        )
    return value


def _add_tokens(folder: Path, config: Mapping[str, Any], metadata: dict[str, Any]) -> None:
    """Tokens that the configuration adds, or gives another role, among those of the model."""
    tokens: list[str] = metadata[f"{PREFIX}tokens"]
    types: list[int] = metadata[f"{PREFIX}token_type"]
    scores: list[float] = metadata[f"{PREFIX}scores"]
    added = {
        index: {"content": content, "special": False}
        for content, index in read_json_if_there(folder / "added_tokens.json").items()
    }
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping) or not all(str(i).isdecimal() for i in decoder):
        raise CheckpointError(f"{folder}/tokenizer_config.json: added_tokens_decoder has no ids")
    added |= {int(index): token for index, token in decoder.items()}
    if not all(type(index) is int for index in added):
        raise CheckpointError(f"{folder}/added_tokens.json: holds something else than ids")
    for index, token in sorted(added.items()):
        content = token.get("content") if isinstance(token, Mapping) else None
        if not isinstance(content, str) or not content or index > len(tokens) or index < 0:
            raise CheckpointError(f"{folder}: added token {index} has no content or no place")
        if flag := next((flag for flag in _FLAGS if token.get(flag)), None):
            raise ConfigError(
                f"{folder}: added token {content!r} has {flag}, which cannot be converted; "
                "a tokenizer.json would do"
            )
        if index == len(tokens):
            tokens.append(content)
            types.append(TokenType.NORMAL)
            scores.append(0.0)
        elif tokens[index] != content:
            raise CheckpointError(
                f"{folder}: token {index} is {tokens[index]!r} in tokenizer.model and {content!r} "
                "in its configuration"
            )
        if types[index] != TokenType.UNKNOWN:
            types[index] = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
