"""What a caller wants answered, as token ids: plain prompts, ids, conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortolan.errors import RequestError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.text.no_tokenizer import NoTokenizer, no_text
from ortolan.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ortolan.runtime.text.chat_template import ChatTemplate

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class Prompts:
    """A bundle's tokenizer and chat template at work; the template is opened when needed."""

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer) -> None:
        self._path = bundle.path
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a plain prompt; ids pass as they are. An empty text becomes BOS, if any.

        Raises RequestError.
        """
        if not isinstance(prompt, str):
            return _checked_ids(prompt)
        ids = self._tokenizer.encode(prompt)
        if not ids and self._tokenizer.bos_id is not None:
            ids = [self._tokenizer.bos_id]
        return ids

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises RequestError, TemplateError.
        """
        if isinstance(self._tokenizer, NoTokenizer):
            raise no_text()
        if self._template is None:
            # Here, since jinja2 takes 35 ms to import, which a plain prompt need not wait for.
            from ortolan.runtime.text.chat_template import ChatTemplate

            self._template = ChatTemplate.open(self._path, self._tokenizer)
        return self._tokenizer.encode_chat(self._template.render(messages))


def _checked_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [int(token_id) for token_id in prompt]
    except (TypeError, ValueError):
        raise RequestError("a prompt must be text or a list of token ids") from None
