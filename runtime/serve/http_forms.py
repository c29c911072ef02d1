"""What answers look like on the wire: chat's objects and completions', whole or in events.

An event's JSON is put together from pieces made once per stream: at hundreds of events a second
on the cores that run the model, a general encoder's time is time taken from the model.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from json.encoder import encode_basestring as quoted
from typing import Any

from ortolan.runtime.params import TokenEvent
from ortolan.runtime.serve.http_answers import Answer, Total
from ortolan.runtime.serve.http_logprobs import CompletionLogprobs, chat_logprobs
from ortolan.runtime.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_REASONS = {None: "null", "stop": '"stop"', "length": '"length"'}


class Form:
    """The parts that both shapes share.

    usage: whether events say `"usage": null` before the one that has it.
    """

    prefix = ""
    whole_object = ""
    event_object = ""

    def __init__(self, model: str, *, usage: bool) -> None:
        identity = f'{{"id":"{self.prefix}{secrets.token_hex(12)}"'
        rest = f',"created":{int(time.time())},"model":{dump(model)},'
        self._whole = f'{identity},"object":"{self.whole_object}"{rest}'
        self._event = f'data: {identity},"object":"{self.event_object}"{rest}'
        self._tail = ',"usage":null}\n\n' if usage else "}\n\n"

    def event(self, number: int, event: TokenEvent) -> bytes:
        """What an answer has grown by as a server-sent event; empty if there is nothing to say."""
        raise NotImplementedError

    def usage_event(self, total: Total) -> bytes:
        """The event that has the usage and no choice."""
        return f'{self._event}"choices":[],"usage":{total.as_json}}}\n\n'.encode()

    def choice(self, number: int, answer: Answer) -> dict[str, Any]:
        """A whole answer."""
        raise NotImplementedError

    def whole(self, answers: Sequence[Answer], total: Total) -> bytes:
        """All answers as one object."""
        choices = dump([self.choice(number, answer) for number, answer in enumerate(answers)])
        return f'{self._whole}"choices":{choices},"usage":{total.as_json}}}'.encode()


class ChatForm(Form):
    """Chat completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, model: str, *, usage: bool, logprobs: bool) -> None:
        super().__init__(model, usage=usage)
        self._logprobs = logprobs
        self._begun: set[int] = set()

    def event(self, number: int, event: TokenEvent) -> bytes:
        role = ""
        if number not in self._begun:
            self._begun.add(number)
            role = '"role":"assistant",'
        elif not event.text and not event.logprobs and event.finish_reason is None:
            return b""
        logprobs = dump(chat_logprobs(event.logprobs)) if self._logprobs else "null"
        return (
            f'{self._event}"choices":[{{"index":{number},'
            f'"delta":{{{role}"content":{quoted(event.text)}}},"logprobs":{logprobs},'
            f'"finish_reason":{_REASONS[event.finish_reason]}}}]{self._tail}'
        ).encode()

    def choice(self, number: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": number,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(answer.logprobs) if self._logprobs else None,
            "finish_reason": answer.finish_reason,
        }


class CompletionForm(Form):
    """Plain completions.

    logprobs: as asked for. echoes: the text of each prompt, which goes before its answers, or
    none. prompts: their ids. n: answers per prompt.
    """

    prefix = "cmpl-"
    whole_object = event_object = "text_completion"

    def __init__(
        self,
        model: str,
        *,
        usage: bool,
        logprobs: int | None,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str] | None,
        n: int,
    ) -> None:
        super().__init__(model, usage=usage)
        self._with_logprobs = logprobs is not None
        self._prompts = prompts
        self._echoes = echoes
        self._n = n
        count = len(prompts) * n
        self._logprobs = [CompletionLogprobs(tokenizer, top=bool(logprobs)) for _ in range(count)]
        self._begun: set[int] = set()

    def event(self, number: int, event: TokenEvent) -> bytes:
        text = event.text
        if number not in self._begun:
            self._begun.add(number)
            text = self._echo(number) + text
        if not text and not event.logprobs and event.finish_reason is None:
            return b""
        logprobs = self._dumped(number, event)
        return (
            f'{self._event}"choices":[{{"index":{number},"text":{quoted(text)},'
            f'"logprobs":{logprobs},'
            f'"finish_reason":{_REASONS[event.finish_reason]}}}]{self._tail}'
        ).encode()

    def choice(self, number: int, answer: Answer) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs:
            prompt = zip(self._prompts[number // self._n], answer.prompt_logprobs, strict=False)
            own = [(found.chosen.token_id, found) for found in answer.logprobs]
            logprobs = self._logprobs[number].add([*prompt, *own])
        return {
            "index": number,
            "text": self._echo(number) + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
        }

    def _dumped(self, number: int, event: TokenEvent) -> str:
        if not self._with_logprobs:
            return "null"
        prompt = zip(self._prompts[number // self._n], event.prompt_logprobs, strict=False)
        own = [(found.chosen.token_id, found) for found in event.logprobs]
        return dump(self._logprobs[number].add([*prompt, *own]))

    def _echo(self, number: int) -> str:
        return self._echoes[number // self._n] if self._echoes else ""


def dump(value: Any) -> str:
    """`value` as JSON, without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
