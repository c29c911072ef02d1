"""The front door of the runtime: a bundle as an object that answers in text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from ortolan.errors import RequestError, UsageError
from ortolan.graphs.manifest import Manifest
from ortolan.optional import require
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.params import (
    Completion,
    EngineConfig,
    FinishReason,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from ortolan.runtime.sampling_defaults import sampling_defaults
from ortolan.runtime.text.detokenizer import Detokenizer
from ortolan.runtime.text.no_tokenizer import NoTokenizer, no_text, open_tokenizer
from ortolan.runtime.text.stop import StopMatcher
from ortolan.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ortolan.runtime.engine.engine import Engine, Step
    from ortolan.runtime.engine.sampler import Sampled
    from ortolan.runtime.text.chat_template import ChatTemplate

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def load(path: str | Path, **settings: Any) -> LLM:
    """Open a bundle's folder; `settings` are the fields of EngineConfig.

    Raises BundleError, ProviderError, MissingDependencyError, UsageError, EngineError.
    """
    known = [item.name for item in fields(EngineConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise UsageError(f"{unknown[0]} is no setting; there are {', '.join(known)}")
    return LLM(Bundle.open(path), EngineConfig(**settings))


class LLM:
    """A loaded model. Close it, or use it as a context manager, to give its memory back.

    sampling_defaults: what the checkpoint says about sampling, as fields of SamplingParams.
    default_params: the same over the fields' own defaults; taken where a call gives no params.
    Params that are given are taken as they are.
    Not safe for use from several threads at once.
    """

    def __init__(self, bundle: Bundle, config: EngineConfig) -> None:
        require("onnxruntime", "cpu", "running a model")
        from ortolan.runtime.engine.engine import Engine

        self.manifest: Manifest = bundle.manifest
        self.config = config
        self.tokenizer: Tokenizer = open_tokenizer(bundle)
        vocab_size = bundle.manifest.model.vocab_size
        self.sampling_defaults: Mapping[str, Any] = sampling_defaults(bundle.path, vocab_size)
        self.default_params = SamplingParams(**self.sampling_defaults)
        self._path = bundle.path
        self._template: ChatTemplate | None = None
        num_valid = min(self.tokenizer.vocab_size, vocab_size)
        self._engine: Engine | None = Engine(bundle, config, num_valid)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Tokens as they are made; the last event has the finish reason and the usage.

        Raises RequestError before the first event for a prompt or setting that cannot be served.
        """
        return self._stream(self.encode(prompt), params, continues=True)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[TokenEvent]:
        """The answer to a conversation; see `stream`. Raises TemplateError too.

        KV that an earlier prompt left is reused as far as this one begins alike.
        """
        return self._stream(self.encode_chat(messages), params, continues=False)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Whole answers, in the order of the prompts."""
        return [self._complete(self.stream(prompt, params)) for prompt in _as_list(prompts)]

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """The whole answer to a conversation."""
        return self._complete(self.stream_chat(messages, params))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a plain prompt; ids pass as they are. An empty text becomes BOS, if any."""
        if not isinstance(prompt, str):
            return _checked_ids(prompt)
        ids = self.tokenizer.encode(prompt)
        if not ids and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id]
        return ids

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if isinstance(self.tokenizer, NoTokenizer):
            raise no_text()
        if self._template is None:
            # Here, since jinja2 takes 35 ms to import, which a plain prompt need not wait for.
            from ortolan.runtime.text.chat_template import ChatTemplate

            self._template = ChatTemplate.open(self._path, self.tokenizer)
        return self.tokenizer.encode_chat(self._template.render(messages))

    def logits(
        self, token_ids: Sequence[int], positions: Sequence[int] | None = None
    ) -> npt.NDArray[np.float32]:
        """Logits [n, vocab] after the tokens at `positions`, or after every token."""
        return self._running().logits(token_ids, positions)

    def close(self) -> None:
        """Free the sessions and the KV cache. Calling it twice is harmless."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(
        self, ids: list[int], params: SamplingParams | None, *, continues: bool
    ) -> Iterator[TokenEvent]:
        engine = self._running()
        params = self.default_params if params is None else params
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise no_text()
        request = Request(ids, params)
        engine.check(request)  # now, not when the first event is asked for
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self.tokenizer.eos_ids)
        detokenizer = Detokenizer(self.tokenizer, continues=continues)
        return self._events(engine.stream(request, ends), request, detokenizer)

    def _events(
        self, steps: Iterator[Step], request: Request, detokenizer: Detokenizer
    ) -> Iterator[TokenEvent]:
        """Tokens to text: hold back what may be half a character or the start of a stop string."""
        matcher = StopMatcher(request.params.stop)
        produced = 0
        try:
            for step in steps:
                produced += 1
                # A token that ends the answer is not part of its text.
                ended = step.finish_reason == "stop"
                text = "" if ended else detokenizer.push(step.sampled.token_id)
                if step.finish_reason is not None:
                    text += detokenizer.flush()
                text, matched = matcher.push(text)
                reason: FinishReason | None = "stop" if matched else step.finish_reason
                usage = None
                if reason is not None:
                    text += matcher.flush()
                    usage = Usage(len(request.prompt_ids), produced, step.cached_tokens)
                logprob, top = self._logprobs(step.sampled)
                yield TokenEvent(text, step.sampled.token_id, reason, usage, logprob, top)
                if reason is not None:
                    return
            # Only max_tokens 0 makes no token at all.
            yield TokenEvent("", None, "length", Usage(len(request.prompt_ids), 0))
        finally:
            cast(Any, steps).close()  # frees the slot at once, whoever stopped reading

    def _logprobs(self, sampled: Sampled) -> tuple[TokenLogprob | None, tuple[TokenLogprob, ...]]:
        if sampled.logprob is None:
            return None, ()

        def entry(token_id: int, logprob: float) -> TokenLogprob:
            data = self.tokenizer.token_bytes(token_id, special=True)
            return TokenLogprob(token_id, data, logprob)

        top = tuple(entry(token_id, logprob) for token_id, logprob in sampled.top_logprobs)
        return entry(sampled.token_id, sampled.logprob), top

    def _complete(self, events: Iterator[TokenEvent]) -> Completion:
        start = time.perf_counter()
        texts, ids = [], []
        ttft_s = 0.0
        for event in events:
            ttft_s = ttft_s or time.perf_counter() - start
            texts.append(event.text)
            if event.token_id is not None:
                ids.append(event.token_id)
        assert event.finish_reason is not None
        assert event.usage is not None
        return Completion("".join(texts), tuple(ids), event.finish_reason, event.usage, ttft_s)

    def _running(self) -> Engine:
        if self._engine is None:
            raise RequestError("this model is closed; load it again")
        return self._engine


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. A flat list of ids is one prompt."""
    if isinstance(prompts, str) or (prompts and not isinstance(prompts[0], str | Sequence)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _checked_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [int(token_id) for token_id in prompt]
    except (TypeError, ValueError):
        raise RequestError("a prompt must be text or a list of token ids") from None
