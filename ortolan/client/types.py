"""What a client gives and gets. The names are the runtime's, which a client need not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length"]
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class Settings(TypedDict, total=False):
    """What a call may say beside its prompt. What is left out, or None, is the server's to choose.

    The first ones are those of ortolan.SamplingParams; their meanings are in ortolan.proto.
    priority: lower numbers go first. cache_salt: cached prompts are shared within it only.
    timeout_s: seconds for the whole call, retries included. request_id: names it in logs.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None
    cache_salt: str | None
    timeout_s: float | None
    request_id: str | None


@dataclass(frozen=True)
class Logprob:
    """A token's natural-log probability under the model, before penalties and temperature."""

    token_id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class PositionLogprobs:
    """What the model gave at one position: the token that stands there, and the likeliest."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens really processed. `cached_tokens` counts prompt tokens whose KV was reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Event:
    """What one answer has grown by; see ortolan.TokenEvent.

    prompt_logprobs: on an answer's first events, together one entry per prompt token.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    choice: int = 0
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A whole answer. ttft_s: seconds from the call to its first token."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    ttft_s: float
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()


@dataclass(frozen=True)
class Model:
    """What a server serves; the fields of the message Model.

    sampling_defaults: what the checkpoint says about sampling.
    """

    name: str
    created_s: int
    architecture: str
    vocab_size: int
    context_len: int
    has_tokenizer: bool
    has_chat_template: bool
    sampling_defaults: Mapping[str, Any]
    max_choices: int
    max_slots: int
    server_version: str


@dataclass(frozen=True)
class Stats:
    """What an engine is doing and has done; the fields of the message StatsResponse.

    not_ready: why requests should go elsewhere; empty if they are welcome.
    """

    running: int
    waiting: int
    kv_tokens: int
    kv_budget_tokens: int
    steps: int
    preemptions: int
    prompt_tokens: int
    completion_tokens: int
    prefix_blocks: int
    prefix_capacity_blocks: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    ended: Mapping[str, int]
    not_ready: str
    phase_seconds: Mapping[str, float]
