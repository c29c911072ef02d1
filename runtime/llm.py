"""The front door of the runtime: a bundle as an object that answers in text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    PositionLogprobs,
    Request,
    SamplingParams,
    TokenEvent,
)
from ortolan.runtime.sampling_defaults import sampling_defaults
from ortolan.runtime.text.no_tokenizer import open_tokenizer
from ortolan.runtime.text.prompts import Messages, Prompt, Prompts
from ortolan.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ortolan.runtime.engine.engine import Engine
    from ortolan.runtime.engine.life import RequestHandle


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
        from ortolan.runtime.engine.opening import open_engine

        self.manifest: Manifest = bundle.manifest
        self.config = config
        self.tokenizer: Tokenizer = open_tokenizer(bundle)
        self.sampling_defaults: Mapping[str, Any] = sampling_defaults(
            bundle.path, bundle.manifest.model.vocab_size
        )
        self.default_params = SamplingParams(**self.sampling_defaults)
        self._prompts = Prompts(bundle, self.tokenizer)
        self._engine: Engine | None = open_engine(bundle, config, self.tokenizer)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Tokens as they are made; the last event has the finish reason and the usage.

        Raises RequestError before the first event for a prompt or setting that cannot be served.
        """
        return self._running().stream(self._request(self.encode(prompt), params))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[TokenEvent]:
        """The answer to a conversation; see `stream`. Raises TemplateError too.

        KV that an earlier prompt left is reused as far as this one begins alike.
        """
        request = self._request(self.encode_chat(messages), params, continues=False)
        return self._running().stream(request)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Whole answers, in the order of the prompts; `n` of them in a row for each.

        The prompts run together, as many at once as there are slots.
        """
        requests = [self._request(self.encode(prompt), params) for prompt in _as_list(prompts)]
        return [answer for answers in self.run(requests) for answer in answers]

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """The whole answer to a conversation (the first one, if `n` asks for several)."""
        request = self._request(self.encode_chat(messages), params, continues=False)
        return next(iter(self.run([request])))[0]

    def run(self, requests: Sequence[Request]) -> Iterator[list[Completion]]:
        """All requests together; their `n` answers each, in order, as soon as they are whole.

        Raises what a request failed of, after cancelling the others.
        """
        engine = self._running()
        for request in requests:
            engine.check(request)
        return _run_all(engine, requests)

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that `run` would refuse."""
        self._running().check(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a plain prompt; ids pass as they are. An empty text becomes BOS, if any."""
        return self._prompts.encode(prompt)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        return self._prompts.encode_chat(messages)

    def logits(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | None = None,
        decoded_from: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Logits [n, vocab] after the tokens at `positions`, or after every token.

        decoded_from: the tokens from this one on go through decode one by one, not through
        prefill, as those of an answer do.
        """
        return self._running().logits(token_ids, positions, decoded_from)

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

    def _request(
        self, ids: list[int], params: SamplingParams | None, *, continues: bool = True
    ) -> Request:
        return Request(ids, params or self.default_params, continues=continues)

    def _running(self) -> Engine:
        if self._engine is None:
            raise RequestError("this model is closed; load it again")
        return self._engine


@dataclass
class _Answer:
    """A choice's events so far, on the way to a Completion."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    first: TokenEvent | None = None
    last: TokenEvent | None = None
    ttft_s: float = 0.0

    def add(self, event: TokenEvent, seconds: float) -> None:
        if self.first is None:
            self.first, self.ttft_s = event, seconds
        self.texts.append(event.text)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.last = event

    def completion(self) -> Completion:
        assert self.first is not None
        assert self.last is not None
        assert self.last.finish_reason is not None
        assert self.last.usage is not None
        return Completion(
            "".join(self.texts),
            tuple(self.token_ids),
            self.last.finish_reason,
            self.last.usage,
            self.ttft_s,
            tuple(self.logprobs),
            self.first.prompt_logprobs,
        )


def _run_all(engine: Engine, requests: Sequence[Request]) -> Iterator[list[Completion]]:
    """Keeps the queue filled, but not fuller than it may be; answers in the requests' order."""
    todo = deque(requests)
    running: deque[tuple[RequestHandle, float, list[_Answer]]] = deque()
    try:
        while todo or running:
            while todo and (not running or engine.has_room(todo[0])):
                request = todo.popleft()
                answers = [_Answer() for _ in range(request.params.n)]
                running.append((engine.submit(request), time.perf_counter(), answers))
            engine.step()
            now = time.perf_counter()
            for handle, began, answers in running:
                while handle.events:
                    event = handle.events.popleft()
                    answers[event.choice].add(event, now - began)
                if handle.error is not None:
                    raise handle.error
            while running and running[0][0].done:
                yield [answer.completion() for answer in running.popleft()[2]]
    finally:
        for handle, _, _ in running:
            engine.cancel(handle)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. A flat list of ids is one prompt."""
    if isinstance(prompts, str) or (prompts and not isinstance(prompts[0], str | Sequence)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
