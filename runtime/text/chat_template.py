"""A bundle's chat template: messages to a prompt, with the user's text kept apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from ortolan.errors import BundleError, TemplateError
from ortolan.runtime.text.markers import GUARDS, Markers, RenderedChat
from ortolan.runtime.text.sandbox import SandboxedTemplate
from ortolan.runtime.text.tokenizer import Tokenizer


class ChatTemplate:
    """A chat template with the tokenizer that its prompts are for."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises TemplateError if `source` is not a template."""
        self._source = source
        self._template = SandboxedTemplate(source)
        self._tokenizer = tokenizer
        ids = {
            "bos_token": tokenizer.bos_id,
            "eos_token": next(iter(tokenizer.eos_ids), None),
            "pad_token": tokenizer.pad_id,
        }
        self._constants: dict[str, Any] = {"tools": None, "documents": None} | {
            name: (tokenizer.token(index) or "") if index is not None else ""
            for name, index in ids.items()
        }

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read a bundle's folder. Raises TemplateError if the bundle has no usable template."""
        file = path / "chat_template.jinja"
        try:
            source = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise TemplateError(
                f"{path} has no chat template, so it cannot chat; use a plain prompt instead"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{file} is damaged ({error}); export the bundle again") from error
        return cls(source, tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> RenderedChat:
        """The prompt for a chat.

        A message has a `role` and a `content`: text, None, or parts {"type": "text", "text": ...},
        which are joined by line breaks. Other keys, and `variables`, reach the template as they
        are. Control tokens spelled in any of these stay text. In the assistant's messages other
        added tokens keep their meaning, since templates look there for thinking tags.
        Raises TemplateError, with the template's own words where it refuses the messages.
        """
        checked = _check_messages(messages)
        everything, control = self._tokenizer.markers, self._tokenizer.control_markers
        try:
            guard = _free_character((self._source, checked, variables))
            guarded = [
                _guarded(message, control if message["role"] == "assistant" else everything, guard)
                for message in checked
            ]
            variables = _guarded(variables, everything, guard)
        except RecursionError:
            raise TemplateError("the request is nested too deeply; send a flatter one") from None
        text = self._template.render(
            {
                **self._constants,
                **variables,
                "messages": guarded,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return RenderedChat.from_guarded(text, guard)


def _check_messages(messages: object) -> list[dict[str, Any]]:
    if not _is_list(messages) or not messages:
        raise TemplateError("messages is not a list of at least one message; give one")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError(f"{where} is not an object with a role; give it a role that is text")
    content = message.get("content")
    if content is None:
        content = ""  # templates concatenate it
    elif _is_list(content):
        parts = (_check_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
        content = "\n".join(parts)
    elif not isinstance(content, str):
        raise TemplateError(f"{where}.content is not text, null or a list of text parts; give one")
    return {**message, "content": content}


def _check_part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise TemplateError(
            f'{where} is not {{"type": "text", "text": ...}}, the only kind of part served; '
            "send text"
        )
    return text


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _guarded(value: Any, markers: Markers, guard: str) -> Any:
    """`value` with every text in it guarded, however deep it is nested."""
    if isinstance(value, str):
        return markers.guarded(value, guard)
    if isinstance(value, Mapping):
        return {
            _guarded(key, markers, guard): _guarded(item, markers, guard)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_guarded(item, markers, guard) for item in value]
    return value


def _free_character(value: object) -> str:
    """A private-use character that occurs in no text of `value`."""
    texts = list(_texts(value))
    for code in GUARDS:
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise TemplateError("the messages use every private-use character; leave some of them out")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
