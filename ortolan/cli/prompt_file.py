"""A file of prompts: a line of text each, or, where its name ends in .jsonl, an object each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ortolan.cli.sampling import GivenSampling
from ortolan.errors import OrtolanError, RequestError
from ortolan.runtime.params import SamplingParams

_SETTINGS = frozenset(item.name for item in fields(SamplingParams))
_KEYS = frozenset(("id", "prompt", "messages"))


@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file: a text, token ids, or the messages of a conversation.

    where: the file's name and the line, for errors. id: the line's own name for it, if any.
    settings: fields of SamplingParams that hold for it alone.
    """

    where: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None = None
    id: str | int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, given: GivenSampling, defaults: Mapping[str, Any]) -> SamplingParams:
        """Its own settings, over the options', over `defaults`. Raises RequestError."""
        with self.named():
            return GivenSampling({**given.fields, **self.settings}).over(defaults)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors say which line they are about."""
        try:
            yield
        except OrtolanError as error:
            raise RequestError(f"{self.where}: {error}") from error


def read_prompts(path: Path, *, chat: bool, system: str | None) -> list[FilePrompt]:
    """All prompts of a file; - is standard input, read as lines of text.

    chat: texts become a user's message, after the message `system`, if there is one.
    Raises RequestError, naming the line, for what is no prompt.
    """
    name = "standard input" if str(path) == "-" else path.name
    objects = path.suffix == ".jsonl"
    found = []
    for number, line in enumerate(_lines(path, name), 1):
        where = f"{name}, line {number}"
        text = _text(line, where)
        if not text.strip():
            if objects:
                continue
            raise RequestError(f"{where} is empty; give a prompt per line, or objects in a .jsonl")
        prompt = _from_object(text, where) if objects else FilePrompt(where, text)
        found.append(_as_chat(prompt, system) if chat else prompt)
    if not found:
        raise RequestError(f"{name} holds no prompt; give one per line")
    return found


def _lines(path: Path, name: str) -> list[bytes]:
    """The file's lines without their breaks, nor the empty ones at its end."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise RequestError(f"{name} cannot be read ({error.strerror})") from error
    content = content.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
    # Only at line feeds: text may hold what Python counts as line breaks besides.
    return [line.removesuffix(b"\r") for line in content.split(b"\n")] if content else []


def _text(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not UTF-8; convert the file to UTF-8") from error


def _from_object(text: str, where: str) -> FilePrompt:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # no half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is no JSON object ({error})") from error
    if not isinstance(value, dict):
        raise RequestError(f'{where} is no JSON object; write {{"prompt": "..."}}')
    for key in value:
        if key not in _KEYS | _SETTINGS:
            known = ", ".join(sorted(_KEYS) + sorted(_SETTINGS))
            raise RequestError(f"{where} has the key {key!r}; there are {known}")
    if ("prompt" in value) == ("messages" in value):
        raise RequestError(f'{where} needs either "prompt" or "messages"')
    prompt, messages, name = value.get("prompt"), value.get("messages"), value.get("id")
    if "prompt" in value and not _is_prompt(prompt):
        raise RequestError(f"{where}: prompt must be a text or a list of token ids, not empty")
    if "messages" in value and not _are_messages(messages):
        raise RequestError(f"{where}: messages must be a list of objects, not empty")
    if "id" in value and (not isinstance(name, str | int) or isinstance(name, bool)):
        raise RequestError(f"{where}: id must be a text or a whole number")
    settings = {key: value[key] for key in value if key in _SETTINGS}
    if isinstance(bias := settings.get("logit_bias"), dict):
        settings["logit_bias"] = {_token_id(key, where): bias[key] for key in bias}
    return FilePrompt(where, prompt, messages, name, settings)


def _is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(token_id) is int for token_id in value)
    return isinstance(value, str) and bool(value)


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _token_id(key: str, where: str) -> int:
    """JSON's keys are texts."""
    if not (key.isascii() and key.isdigit()):
        raise RequestError(f"{where}: logit_bias has the key {key!r}, which is no token id")
    return int(key)


def _as_chat(prompt: FilePrompt, system: str | None) -> FilePrompt:
    if prompt.messages is not None:
        raise RequestError(f"{prompt.where} has messages, which are a chat already; omit --chat")
    if not isinstance(prompt.prompt, str):
        raise RequestError(f"{prompt.where} has token ids, which --chat cannot use; omit it")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt.prompt})
    return FilePrompt(prompt.where, None, messages, prompt.id, prompt.settings)
