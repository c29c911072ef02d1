"""From a body's fields to requests for the engine and the form of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortolan.runtime.params import Request, SamplingParams
from ortolan.runtime.serve.http_endpoint import Exchange
from ortolan.runtime.serve.http_errors import ApiError, invalid
from ortolan.runtime.serve.http_fields import (
    CHAT,
    COMPLETION,
    Values,
    accepted,
    flag,
    includes_usage,
    sampling,
)
from ortolan.runtime.serve.http_forms import ChatForm, CompletionForm, Form
from ortolan.runtime.serve.http_messages import checked_messages
from ortolan.runtime.serve.service import Service


@dataclass(frozen=True)
class Call:
    """What one HTTP request asks for. usage: whether a stream ends with the usage."""

    requests: tuple[Request, ...]
    form: Form
    stream: bool
    usage: bool


async def chat_call(exchange: Exchange) -> Call:
    """A chat completion. Raises ApiError, RequestError, TemplateError, ClientGoneError."""
    service = exchange.service
    values = accepted(await exchange.body(), CHAT)
    check_model(service, values)
    messages = await exchange.aside(checked_messages, values.get("messages"))
    given, spellings = sampling(values)
    exchange.spellings = {**spellings, "prompt": "messages", "logprobs": "top_logprobs"}
    logprobs = flag(values, "logprobs")
    if logprobs:
        given["logprobs"] = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise invalid("top_logprobs", "is only for logprobs: true")
    params = _params(exchange, given)
    stream, usage = flag(values, "stream"), includes_usage(values)
    ids = await service.encode_chat(messages)
    return Call(
        (Request(ids, params, timeout_s=values.get("timeout_s"), continues=False),),
        ChatForm(service.name, usage=usage, logprobs=logprobs),
        stream,
        usage,
    )


async def completion_call(exchange: Exchange) -> Call:
    """A plain completion of one prompt or several. Raises ApiError, RequestError,
    ClientGoneError.
    """
    service = exchange.service
    values = accepted(await exchange.body(), COMPLETION)
    check_model(service, values)
    prompts = await exchange.aside(_prompts, service, values.get("prompt"))
    given, exchange.spellings = sampling(values)
    echo, logprobs = flag(values, "echo"), values.get("logprobs")
    given["logprobs"] = logprobs
    given["prompt_logprobs"] = logprobs if echo else None
    params = _params(exchange, given, len(prompts))
    stream, usage = flag(values, "stream"), includes_usage(values)
    encoded = [await service.encode(prompt) for prompt in prompts]
    echoes = await exchange.aside(_echoes, service, prompts) if echo else None
    form = CompletionForm(
        service.name,
        usage=usage,
        logprobs=logprobs,
        tokenizer=service.tokenizer,
        prompts=encoded,
        echoes=echoes,
        n=params.n,
    )
    timeout_s = values.get("timeout_s")
    requests = tuple(Request(ids, params, timeout_s=timeout_s) for ids in encoded)
    return Call(requests, form, stream, usage)


def _echoes(service: Service, prompts: Sequence[str | list[int]]) -> list[str]:
    """The prompts' texts."""
    return [
        prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt)
        for prompt in prompts
    ]


def check_ids(service: Service, param: str, ids: Sequence[int]) -> None:
    """Raises ApiError unless the model has all of these tokens."""
    size = service.manifest.model.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise invalid(
            param, f"holds an id that the model does not have; its ids are 0 to {size - 1}"
        )


def check_model(service: Service, values: Values) -> None:
    """Raises ApiError if a model is named and is not the one served."""
    name = values.get("model", service.name)
    if not isinstance(name, str):
        raise invalid("model", "must be a string")
    if name != service.name:
        raise no_model()


def no_model() -> ApiError:
    """404. The name asked for is not repeated: it is input, of any length."""
    return ApiError(
        404,
        "no such model is served here; GET /v1/models lists what is",
        "model_not_found",
        param="model",
    )


def _params(exchange: Exchange, given: Mapping[str, Any], prompts: int = 1) -> SamplingParams:
    params = exchange.service.params(**given)
    answers, most = prompts * params.n, exchange.limits.choices
    if answers > most:
        raise ApiError(
            400,
            f"the request asks for {answers} answers, prompts times n; the most are {most}",
            "invalid_value",
            param="n",
        )
    return params


def _prompts(service: Service, value: Any) -> list[str | list[int]]:
    """The prompts in any of the four shapes. Raises ApiError."""
    if value is None:
        raise invalid("prompt", "is missing", "missing_required_parameter")
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    texts = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
    if not isinstance(prompts, list) or not prompts or not (texts or all(map(_is_ids, prompts))):
        raise invalid("prompt", "must be text, a list of token ids, or a list of one of the two")
    if not texts:
        for ids in prompts:
            check_ids(service, "prompt", ids)
    return prompts


def _is_ids(value: object) -> bool:
    # JSON's true is an int to Python, and a token id to nobody.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
