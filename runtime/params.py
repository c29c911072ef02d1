"""What a caller asks for and what comes back: the dataclasses that cross the runtime's border."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from os import PathLike
from typing import Any, Literal, NoReturn

from ortolan.errors import RequestError, UsageError
from ortolan.runtime import checks

FinishReason = Literal["stop", "length"]

MAX_LOGPROBS = 20
MAX_THREADS = 1024
MAX_PRIORITY = 100
MAX_CHOICES = 128
# A matcher takes half a kilobyte and microseconds per character, for each choice and on the
# engine's thread: a message full of stop strings would halt every stream for seconds.
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 4096
# Each of these is checked in Python, on the thread that feeds every stream: a message full of
# them would halt all for seconds.
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096
# A salt is kept for as long as a block of its prompts is.
MAX_SALT_CHARACTERS = 1024


class FrozenBias(dict[int, float]):
    """Token id -> bias, refusing changes; hashable, picklable and plain to json and asdict."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("sampling parameters cannot be changed; make new ones")

    __setitem__ = __delitem__ = _refuse
    clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenBias], tuple[dict[int, float]]]:
        return FrozenBias, (dict(self),)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop; the field's usual names and meanings.

    Values are checked on construction as far as no model is needed; `check_against_model`
    checks the rest. Sequences become tuples, `logit_bias` a mapping that refuses changes, one
    stop string a tuple of one, numpy numbers Python's. Raises RequestError naming the field.
    """

    max_tokens: int | None = None  # None: until the context is full
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off; -1 is read as 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # prompt and generated tokens, as in Hugging Face
    presence_penalty: float = 0.0  # generated tokens only, as in OpenAI
    frequency_penalty: float = 0.0  # generated tokens only, times how often
    logit_bias: Mapping[int, float] = field(default_factory=FrozenBias)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn from the operating system when the request starts
    n: int = 1
    logprobs: int | None = None  # 0: the chosen token's only
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    def __post_init__(self) -> None:
        top_k = checks.whole("top_k", self.top_k, -1)
        checked: dict[str, object] = {
            "max_tokens": checks.optional_whole("max_tokens", self.max_tokens, 0),
            "temperature": checks.number("temperature", self.temperature, 0.0),
            "top_k": max(top_k, 0),
            "top_p": checks.number("top_p", self.top_p, 0.0, 1.0, above=True),
            "min_p": checks.number("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": checks.number(
                "repetition_penalty", self.repetition_penalty, 0.0, above=True
            ),
            "presence_penalty": checks.number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": checks.number(
                "frequency_penalty", self.frequency_penalty, -2.0, 2.0
            ),
            "logit_bias": _logit_bias(self.logit_bias),
            "stop": _stop(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": checks.flag("ignore_eos", self.ignore_eos),
            "seed": checks.optional_whole("seed", self.seed, -(2**63), 2**64 - 1),
            "n": checks.whole("n", self.n, 1, MAX_CHOICES),
            "logprobs": checks.optional_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": checks.optional_whole(
                "prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken (temperature 0), whatever the other filters say."""
        return self.temperature == 0.0

    def check_against_model(self, vocab_size: int) -> None:
        """Check what depends on the model: token ids and top_k against its `vocab_size`.

        Raises RequestError naming the field.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} holds the token id {checks.shown(token_id)}; "
                        f"the model's ids end at {vocab_size - 1}"
                    )
        if self.top_k > vocab_size:
            raise RequestError(
                f"top_k is {checks.shown(self.top_k)}; the model's vocabulary has {vocab_size} "
                "tokens, and 0 switches top_k off"
            )


def _logit_bias(value: object) -> FrozenBias:
    if not isinstance(value, Mapping):
        raise checks.refused("logit_bias", value, "a mapping from token ids to numbers")
    checks.at_most("logit_bias", len(value), "token ids", MAX_LOGIT_BIASES)
    return FrozenBias(
        (
            checks.whole("a token id in logit_bias", token_id, 0),
            checks.number(f"logit_bias of {checks.shown(token_id)}", bias, -100.0, 100.0),
        )
        for token_id, bias in value.items()
    )


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise checks.refused("stop", value, "a string or a list of strings")
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"stop holds {checks.shown(text)}; it must be a non-empty string or a list of them"
            )
    characters = sum(map(len, value))
    if len(value) > MAX_STOP_STRINGS or characters > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop holds {len(value)} strings of {characters} characters in all; at most "
            f"{MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS} may be given"
        )
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    # A numpy array is no Sequence; anything that iterates over whole numbers will do.
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not hasattr(value, "__iter__"):
        raise checks.refused(name, value, "a list of token ids")
    value = tuple(islice(value, MAX_STOP_TOKEN_IDS + 1))
    checks.at_most(name, len(value), "token ids", MAX_STOP_TOKEN_IDS)
    return tuple(checks.whole(f"a token id in {name}", token_id, 0) for token_id in value)


@dataclass(frozen=True)
class Request:
    """One prompt with its settings. `prompt_ids` int, at least one.

    priority: lower numbers go first; equal ones first come, first served.
    timeout_s: seconds from submission after which the request ends, wherever it is.
    salt: prompts share cached prefixes only with prompts of the same salt (one per tenant).
    continues: the answer's text goes on from the prompt's, so that a leading space is kept.
    Raises RequestError naming the field.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    salt: str = ""
    continues: bool = True

    def __post_init__(self) -> None:
        checks.whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout_s is not None:
            checks.number("timeout_s", self.timeout_s, 0.0, above=True)
        if not isinstance(self.salt, str):
            raise checks.refused("salt", self.salt, "a string")
        checks.at_most("salt", len(self.salt), "characters", MAX_SALT_CHARACTERS)


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural-log probability under the model, before penalties and temperature."""

    token_id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class PositionLogprobs:
    """What the model gave at one position: the token that stands there, and the likeliest."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens really processed. `cached_tokens` counts prompt tokens whose KV was reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """What one answer has grown by: usually one token, several where a reader is slow.

    `text` may be empty while a character is incomplete. token_ids is empty only for a request
    for no tokens (max_tokens 0). logprobs: one entry per token, if asked for. choice: which of
    a request's `n` answers. usage: on an answer's last event.
    prompt_logprobs: on an answer's first event, if asked for: one entry per prompt token, None
    for the first, which nothing comes before.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    choice: int = 0
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()

    @property
    def token_id(self) -> int | None:
        """The last of its tokens; None if it has none."""
        return self.token_ids[-1] if self.token_ids else None

    @property
    def logprob(self) -> TokenLogprob | None:
        """The last token's, if asked for."""
        return self.logprobs[-1].chosen if self.logprobs else None

    @property
    def top_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The likeliest tokens at the last position, if asked for."""
        return self.logprobs[-1].top if self.logprobs else ()

    def followed_by(self, other: TokenEvent) -> TokenEvent:
        """Both as one event, of the same choice."""
        assert other.choice == self.choice
        assert self.finish_reason is None
        return replace(
            other,
            text=self.text + other.text,
            token_ids=self.token_ids + other.token_ids,
            logprobs=self.logprobs + other.logprobs,
            prompt_logprobs=self.prompt_logprobs or other.prompt_logprobs,
        )


@dataclass(frozen=True)
class Completion:
    """A whole answer. ttft_s: seconds from the call to the first token."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    ttft_s: float
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()


def _provider_options(value: object) -> None:
    """Names and values that are texts or numbers; what they mean is the provider's to say."""
    if not isinstance(value, Mapping):
        raise checks.refused("provider_options", value, "a mapping from names to values")
    for name, given in value.items():
        if not (isinstance(name, str) and isinstance(given, str | int | float)):
            raise RequestError(
                f"provider_options holds {checks.shown(name)}: {checks.shown(given)}; names are "
                "texts, values texts or numbers"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine, fixed at load.

    max_slots: requests that run at once (each choice of n counts).
    max_context: tokens per slot; None takes the bundle's.
    prefill_chunk: most prompt tokens that one prefill call reads (at least 2).
    gap_steps: while a prompt is read, the gap between two tokens of a running request may grow
    to this many plain steps (at least 1.5); gap_ms: the same bound in milliseconds, if given.
    whole_prompt: prompts of at most so many tokens, and of a chunk, are read in one piece whatever
    gap that makes, unless gap_ms is given: short ones do not wait, and cost less in one piece.
    kv_tokens: most tokens whose KV running requests may hold; None: what memory has room for
    (see runtime/plan.py).
    prefix_cache_mb: MiB for KV of earlier prompts; None: a sixth of that room; 0: off.
    max_waiting, max_waiting_tokens: answers (n of a request count n), and tokens of their prompts,
    that may wait.
    priority_patience: how many requests of a better priority may overtake one that waits.
    accuracy: "default" computes products with blocks with int8 activations, "exact" in float32;
    W8A8 products, which have int8 activations by their nature, are the same in both.
    decode_graph: of a bundle whose phases have weights of their own, "decode" is the graph with
    decode's and "decode_many" the one with prefill's. "auto" takes the latter from 8 slots on,
    where it is faster once all are taken. One graph serves all answers of an engine, whoever else
    is running.
    provider: a name, or the path of a plug-in library; provider_options: its own, by their names;
    strict: whether a provider that leaves compute to the CPU is refused. kv_copies: whether one
    is taken that cannot write the KV cache in place.
    Raises UsageError naming the field; what the bundle decides is checked when it is loaded.
    """

    provider: str = "cpu"
    threads: int | None = None
    cache_dir: str | None = None
    max_slots: int = 16
    max_context: int | None = None
    prefill_chunk: int = 256
    gap_steps: float = 4.0
    gap_ms: float | None = None
    whole_prompt: int = 256
    kv_tokens: int | None = None
    prefix_cache_mb: int | None = None
    max_waiting: int = 1024
    max_waiting_tokens: int = 1_000_000
    priority_patience: int = 16
    accuracy: Literal["default", "exact"] = "default"
    decode_graph: Literal["auto", "decode", "decode_many"] = "auto"
    provider_options: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    kv_copies: bool = False

    def __post_init__(self) -> None:
        try:
            checks.optional_whole("threads", self.threads, 1, MAX_THREADS)
            checks.whole("max_slots", self.max_slots, 1)
            checks.optional_whole("max_context", self.max_context, 2)
            checks.whole("prefill_chunk", self.prefill_chunk, 2)
            checks.number("gap_steps", self.gap_steps, 1.5)
            if self.gap_ms is not None:
                checks.number("gap_ms", self.gap_ms, 0.0, above=True)
            checks.whole("whole_prompt", self.whole_prompt, 0)
            checks.optional_whole("kv_tokens", self.kv_tokens, 2)
            checks.optional_whole("prefix_cache_mb", self.prefix_cache_mb, 0)
            checks.whole("max_waiting", self.max_waiting, 1)
            checks.whole("max_waiting_tokens", self.max_waiting_tokens, 1)
            checks.whole("priority_patience", self.priority_patience, 0)
            if self.accuracy not in ("default", "exact"):
                raise checks.refused("accuracy", self.accuracy, "default or exact")
            if self.decode_graph not in ("auto", "decode", "decode_many"):
                raise checks.refused(
                    "decode_graph", self.decode_graph, "auto, decode or decode_many"
                )
            if not isinstance(self.provider, str):
                raise checks.refused("provider", self.provider, "a name")
            _provider_options(self.provider_options)
            checks.flag("strict", self.strict)
            checks.flag("kv_copies", self.kv_copies)
            if self.cache_dir is not None and not isinstance(self.cache_dir, str | PathLike):
                raise checks.refused("cache_dir", self.cache_dir, "a folder")
        except RequestError as exc:  # nobody's request, but the caller's setting
            raise UsageError(str(exc)) from None
