"""Tokenizer, chat template and generation settings of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.hf_json import read_json, read_json_if_there
from ortolan.export.hf_slow_tokenizer import slow_tokenizer

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

# What the runtime can undo token by token: byte-level BPE alone, or steps of SentencePiece.
_BYTE_LEVEL, _SENTENCEPIECE = {"ByteLevel"}, {"Replace", "ByteFallback", "Fuse", "Strip"}

# Sampling defaults that a bundle keeps: what is accepted, and how an error says it; the bounds
# are those of the runtime's SamplingParams. All else in the file steers Hugging Face's code.
_SAMPLING: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < 1e9, "a number from 0 up"),
    "top_k": (
        lambda value: isinstance(value, int) and value >= -1,
        "a whole number from 0 up, or -1 for none",
    ),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < 1e9, "a number above 0"),
}


def hf_texts(folder: Path, vocab_size: int) -> dict[str, bytes]:
    """The files of a bundle that concern text, by name.

    Always generation_config.json; tokenizer.json and chat_template.jinja where the folder has
    them in some form. vocab_size: rows of the embedding; no id may be beyond.
    Raises CheckpointError for a damaged file, ConfigError for a tokenizer that we cannot express.
    """
    config = read_json_if_there(folder / TOKENIZER_CONFIG)
    tokenizer = _tokenizer(folder, config)
    library = None
    if tokenizer is not None:
        library = _opened(folder / TOKENIZER, tokenizer)
        _check_vocabulary(folder, library, config, vocab_size)
    ids = _SpecialIds(folder, config, library, vocab_size)
    files = {GENERATION: (json.dumps(ids.generation_config(), indent=2) + "\n").encode()}
    if tokenizer is not None:
        files[TOKENIZER] = tokenizer
        template = _template(folder, config)
        if template:
            files[TEMPLATE] = template.encode()
    return files


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> bytes | None:
    """tokenizer.json as it is, or converted; None for a folder without a tokenizer."""
    if (folder / TOKENIZER).is_file():
        try:
            return (folder / TOKENIZER).read_bytes()
        except OSError as exc:
            raise CheckpointError(f"{folder / TOKENIZER}: cannot be read ({exc.strerror})") from exc
    if (folder / "tokenizer.model").is_file():
        return slow_tokenizer(folder, config)
    for name in ("vocab.json", "merges.txt", "vocab.txt", "tekken.json", TOKENIZER_CONFIG):
        if (folder / name).is_file():
            raise ConfigError(
                f"{folder}: has {name}, but neither {TOKENIZER} nor tokenizer.model; have "
                f"transformers write {TOKENIZER} (AutoTokenizer, then save_pretrained)"
            )
    return None


def _opened(path: Path, data: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as exc:  # the library raises no narrower type
        raise CheckpointError(
            f"{path}: is damaged, or newer than the tokenizers library here "
            f"({str(exc)[:200]}); fetch the file again"
        ) from exc


def _check_vocabulary(
    folder: Path, library: tokenizers.Tokenizer, config: Mapping[str, Any], vocab_size: int
) -> None:
    """Tokens can be read back, the model has rows for them, and no other file adds any."""
    state = json.loads(library.decoder.__getstate__()) if library.decoder else {}
    steps = {step.get("type") for step in state.get("decoders", [state])}
    if not steps <= _BYTE_LEVEL and not steps <= _SENTENCEPIECE:
        raise ConfigError(
            f"{folder / TOKENIZER}: decodes by {', '.join(map(str, sorted(steps, key=str)))}; "
            "supported are ByteLevel, and SentencePiece's steps"
        )
    size = library.get_vocab_size(with_added_tokens=False)
    largest = max(library.get_vocab(with_added_tokens=False).values(), default=-1)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{folder}: {TOKENIZER} has {size} tokens up to id {largest}, but the model has "
            f"{vocab_size}; they do not belong together"
        )
    added = config.get("added_tokens_decoder")
    for index, token in added.items() if isinstance(added, Mapping) else ():
        content = token.get("content") if isinstance(token, Mapping) else token
        if not isinstance(content, str) or str(library.token_to_id(content)) != index:
            raise ConfigError(
                f"{folder}: {TOKENIZER_CONFIG} has token {content!r} as {index}, {TOKENIZER} has "
                "not; have transformers write both again (AutoTokenizer, then save_pretrained)"
            )


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own wins, and of several named ones "default" is taken."""
    path = folder / TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise CheckpointError(f"{path}: cannot be read ({exc}); fetch the file again") from exc
    value, where = config.get("chat_template"), TOKENIZER_CONFIG
    if value is None:
        where = "chat_template.json"
        value = read_json_if_there(folder / where).get("chat_template")
    if isinstance(value, list):
        named = {
            item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)
        }
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(
            f"{folder / where}: chat_template is neither a text nor a list of named ones"
        )
    return value


class _SpecialIds:
    """Which ids begin, end and pad a text, and the sampling defaults.

    generation_config.json is asked first, then config.json, then the tokens that
    tokenizer_config.json or special_tokens_map.json name.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        library: tokenizers.Tokenizer | None,
        vocab_size: int,
    ) -> None:
        self._folder = folder
        self._generation = read_json_if_there(folder / GENERATION)
        self._model = read_json(folder / "config.json")
        self._names = {**read_json_if_there(folder / "special_tokens_map.json"), **config}
        self._library = library
        self._vocab_size = vocab_size

    def generation_config(self) -> dict[str, Any]:
        """What generation_config.json of the bundle says."""
        values: dict[str, Any] = {}
        own = self._named("eos")
        # The first end token is the one that chat templates write, so the tokenizer's own leads.
        ends = list(dict.fromkeys([*own, *(self._given("eos") or [])]))
        begins = self._given("bos") or self._named("bos")
        pads = self._given("pad") or self._named("pad")
        if begins:
            values["bos_token_id"] = begins[0]
        if ends:
            values["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        if pads:
            values["pad_token_id"] = pads[0]
        return {**values, **self._sampling()}

    def _given(self, name: str) -> list[int] | None:
        """Ids from generation_config.json, else from config.json."""
        key = f"{name}_token_id"
        for file, values in ((GENERATION, self._generation), ("config.json", self._model)):
            value = values.get(key)
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if name == "pad" and ids == [-1]:  # old conversions wrote -1 for none
                continue
            if any(type(i) is not int or not 0 <= i < self._vocab_size for i in ids):
                raise CheckpointError(
                    f"{self._folder / file}: {key} is {str(value)[:80]}, expected ids below "
                    f"{self._vocab_size}"
                )
            return ids
        return None

    def _named(self, name: str) -> list[int]:
        """The id of the token that the tokenizer calls so, if it has one."""
        token = self._names.get(f"{name}_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        if self._library is None or not isinstance(content, str):
            return []
        index = self._library.token_to_id(content)
        return [index] if index is not None and index < self._vocab_size else []

    def _sampling(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        sample = self._generation.get("do_sample")
        if isinstance(sample, bool):
            values["do_sample"] = sample
        elif sample is not None:
            raise self._refused("do_sample", sample, "true or false")
        for key, (accepts, said) in _SAMPLING.items():
            value = self._generation.get(key)
            if value is None:
                continue
            if type(value) not in (int, float) or not accepts(value):
                raise self._refused(key, value, said)
            values[key] = value
        return values

    def _refused(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder / GENERATION}: {key} is {str(value)[:80]}, expected {expected}; "
            "correct the file, or take the setting out of it"
        )
