"""The fields of a request: which are accepted, which are ignored, which are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortolan.runtime.params import MAX_CHOICES, MAX_LOGPROBS
from ortolan.runtime.serve.http_errors import ApiError, invalid, shown_name

Schema = dict[str, Any]
Values = dict[str, Any]


def _number(low: float | None = None, high: float | None = None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": "number"} | {key: value for key, value in bounds.items() if value is not None}


def _whole(low: int | None = None, high: int | None = None) -> Schema:
    return _number(low, high) | {"type": "integer"}


_FLAG: Schema = {"type": "boolean"}
_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": _whole(0)}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
# For readers of the document; http_messages.py is what checks.
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": _TEXT},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]},
        "name": _TEXT,
    },
}


@dataclass(frozen=True)
class Field:
    """What an accepted field takes, as OpenAPI says it, and what it does."""

    schema: Schema
    about: str


# Fields whose names and values SamplingParams knows and checks.
_AS_THEY_ARE = {
    "temperature": Field(_number(0), "0 takes the likeliest token; the default is the model's"),
    "top_p": Field(_number(0, 1), "least probability that the tokens drawn from have together"),
    "top_k": Field(_whole(-1), "draw from so many likeliest tokens; 0 is all"),
    "min_p": Field(_number(0, 1), "least probability, relative to the likeliest token's"),
    "repetition_penalty": Field(_number(0), "on tokens of prompt and answer; 1 is none"),
    "presence_penalty": Field(_number(-2, 2), "on tokens of the answer"),
    "frequency_penalty": Field(_number(-2, 2), "the same, times how often they occurred"),
    "stop": Field({"anyOf": [_TEXT, _TEXTS]}, "strings that end the answer and are not in it"),
    "stop_token_ids": Field(_IDS, "token ids that end the answer"),
    "ignore_eos": Field(_FLAG, "go on after the end token"),
    "seed": Field(_whole(), "same seed, same answer"),
    "n": Field(_whole(1, MAX_CHOICES), "answers per prompt"),
}
COMMON = {
    "model": Field(_TEXT, "the served model's name, which is also the default"),
    "max_tokens": Field(_whole(0), "most tokens of an answer; by default all that fit"),
    **_AS_THEY_ARE,
    "logit_bias": Field(
        {"type": "object", "additionalProperties": _number(-100, 100)},
        "token id as a string -> what is added to its logit",
    ),
    "stream": Field(_FLAG, "send server-sent events"),
    "stream_options": Field(
        {"type": "object", "properties": {"include_usage": _FLAG}},
        "include_usage: one more event with the usage",
    ),
    "timeout_s": Field(_number(0), "seconds after which the request ends with an error"),
}
CHAT = {
    "messages": Field(
        {"type": "array", "minItems": 1, "items": _MESSAGE},
        "objects with role (system, developer, user, assistant), content and perhaps name; "
        "content is text, a list of text parts or, of the assistant, null",
    ),
    **COMMON,
    "max_completion_tokens": Field(_whole(0), "the newer spelling of max_tokens"),
    "logprobs": Field(_FLAG, "whether tokens come with their logprobs"),
    "top_logprobs": Field(_whole(0, MAX_LOGPROBS), "likeliest tokens at each position"),
}
COMPLETION = {
    "prompt": Field(
        {"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}]},
        "text, token ids, or a list of either",
    ),
    **COMMON,
    "echo": Field(_FLAG, "put the prompt before the answer; with max_tokens 0 it is only scored"),
    "logprobs": Field(_whole(0, MAX_LOGPROBS), "likeliest tokens at each position"),
}

# These change nothing here: what they steer happens on somebody else's servers.
IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
)
# What does not exist here, each with the values that ask for nothing.
REFUSED: dict[str, list[Any]] = {
    "audio": [],
    "best_of": [1],
    "chat_template": [],
    "chat_template_kwargs": [{}],
    "echo": [False],
    "function_call": ["none"],
    "functions": [[]],
    "modalities": [["text"]],
    "parallel_tool_calls": [False],
    "prediction": [],
    "reasoning_effort": ["none"],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"],
    "store": [False],
    "suffix": [""],
    "tool_choice": ["none"],
    "tools": [[]],
    "verbosity": ["medium"],
    "web_search_options": [],
}


def accepted(body: Mapping[str, Any], fields: Mapping[str, Field]) -> Values:
    """The body's values for `fields`; null is as good as absent. Raises ApiError for others."""
    values = {}
    for name, value in body.items():
        if name in fields:
            if value is not None:
                values[name] = value
        elif name in REFUSED:
            asks_for_nothing = value is None or any(
                type(value) is type(harmless) and value == harmless for harmless in REFUSED[name]
            )
            if not asks_for_nothing:
                raise invalid(name, "is not supported; leave it out", "unsupported_parameter")
        elif name not in IGNORED:
            shown = shown_name(name)
            raise ApiError(
                400, f"{shown} is no field of this request", "unknown_parameter", param=shown
            )
    return values


def sampling(values: Values) -> tuple[dict[str, Any], dict[str, str]]:
    """SamplingParams' arguments, and how this request spelled them. Raises ApiError."""
    given = {name: values[name] for name in _AS_THEY_ARE if name in values}
    spellings = {name: name for name in (*COMMON, "prompt", "logprobs")}
    limit = _same(values, "max_tokens", "max_completion_tokens")
    if limit is not None:
        spellings["max_tokens"] = limit
        given["max_tokens"] = values[limit]
    if "logit_bias" in values:
        given["logit_bias"] = _bias(values["logit_bias"])
    return given, spellings


def flag(values: Values, name: str) -> bool:
    """A field that is true or false, by default false. Raises ApiError."""
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name, "must be true or false")
    return value


def includes_usage(values: Values) -> bool:
    """stream_options, of which usage is the one. Raises ApiError."""
    options = values.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid("stream_options", "must be an object")
    if not values.get("stream"):
        raise invalid("stream_options", "is only for stream: true")
    for name, value in options.items():
        harmless = name == "include_obfuscation" and not value
        if name != "include_usage" and not harmless:
            raise invalid(f"stream_options.{shown_name(name)}", "is not supported; leave it out")
    value = options.get("include_usage") or False
    if not isinstance(value, bool):
        raise invalid("stream_options.include_usage", "must be true or false")
    return value


def _same(values: Values, old: str, new: str) -> str | None:
    """Which of two spellings of one field was used, if any; they must agree."""
    if old in values and new in values and values[old] != values[new]:
        raise invalid(new, f"and {old} differ; give one of them")
    return new if new in values else old if old in values else None


def _bias(value: Any) -> Any:
    """JSON's keys are strings, ours are token ids."""
    if not isinstance(value, dict):
        raise invalid("logit_bias", "must be an object from token ids to numbers")
    if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in value):
        raise invalid("logit_bias", "has a key that is no token id")
    return {int(key): bias for key, bias in value.items()}
