"""One loaded bundle, as the servers see it: prompts in, streams of events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from ortolan.errors import EngineError
from ortolan.optional import require
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.async_engine import AsyncEngine, AsyncStream
from ortolan.runtime.engine.engine import EngineStats
from ortolan.runtime.engine.record import RequestRecord
from ortolan.runtime.engine.replicas import Replicas
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.reference import expected_by_cpu, self_test
from ortolan.runtime.sampling_defaults import sampling_defaults
from ortolan.runtime.serve.callers import CALLER
from ortolan.runtime.serve.calls import Call, current_call
from ortolan.runtime.serve.loading import LOADING, LoadingEngine
from ortolan.runtime.serve.metrics import Metrics
from ortolan.runtime.text.no_tokenizer import open_tokenizer
from ortolan.runtime.text.prompts import Messages, Prompt, Prompts

_SHUTTING_DOWN = "the server is shutting down"


class Service:
    """A model under a name. Opening it loads the sessions; `warm_up` makes it ready.

    replicas: engines that share the threads and the requests; each has the settings of `config` to
    itself. load: whether to load them now. Otherwise `warm_up` does; until then requests are
    refused, and all that needs no engine is answered. self_test: compare its results with the
    CPU's first.
    All methods are for one event loop; what takes long runs on threads. An engine that shows no
    sign of life for heartbeat_timeout_s, while it has work, makes the service not ready.
    Raises what `open_engine` does.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: EngineConfig,
        name: str | None = None,
        *,
        replicas: int = 1,
        heartbeat_timeout_s: float = 30.0,
        load: bool = True,
        self_test: bool = False,
    ) -> None:
        onnxruntime = require("onnxruntime", "cpu", "serving a model")
        from ortolan.runtime.plan import context_of

        self.name = name or bundle.path.resolve().name
        self.created_s = int(time.time())
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.config = config
        self.tokenizer = open_tokenizer(bundle)
        self.sampling_defaults = sampling_defaults(bundle.path, self.manifest.model.vocab_size)
        self._prompts = Prompts(bundle, self.tokenizer)
        self.context = context_of(config, self.manifest.model.max_context)
        self.replicas = replicas
        self._self_test = self_test
        self._engine: AsyncEngine | Replicas | LoadingEngine = LoadingEngine()
        self._warm = self._leaving = self._draining = False
        self._watch(str(onnxruntime.__version__), heartbeat_timeout_s)
        if load:
            self._load()

    def _load(self) -> None:
        from ortolan.runtime.engine.opening import open_replicas
        from ortolan.runtime.engine.thread_pool import use_threads

        use_threads(self.config.threads, self.replicas)
        cases = []
        if self._self_test:  # the CPU's sessions are gone before the provider's are made
            cases = expected_by_cpu(self.bundle, self.config, self.tokenizer)
        opened = open_replicas(self.bundle, self.config, self.tokenizer, self.replicas)
        for engine, _ in opened:
            if cases:
                self_test(engine, cases, self.config)
            self.context = engine.context  # less, where the KV budget is
        engines = [AsyncEngine(engine, cpus) for engine, cpus in opened]
        self._engine = engines[0] if self.replicas == 1 else Replicas(engines)

    def _watch(self, onnxruntime: str, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.metrics = Metrics(
            model=self.name,
            provider=self.config.provider,
            onnxruntime=onnxruntime,
            stats=self.stats,
            not_ready=lambda: self.not_ready,
        )

    def open_call(
        self, protocol: Literal["http", "grpc"], request_id: str, headers: Mapping[str, str]
    ) -> Call:
        """A client's call, to which belongs what its task submits from now on."""
        return Call(protocol, request_id, headers, model=self.name, metrics=self.metrics)

    def params(self, **given: Any) -> SamplingParams:
        """Settings that a request gives, over what the checkpoint says, over our defaults.

        Raises RequestError naming the field.
        """
        return SamplingParams(**{**self.sampling_defaults, **given})

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises RequestError."""
        return await asyncio.to_thread(self._prompts.encode, prompt)

    async def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation. Raises RequestError, TemplateError."""
        return await asyncio.to_thread(self._prompts.encode_chat, messages)

    async def submit(self, request: Request) -> AsyncStream:
        """Queue a request of the current call, within its caller's limits and tenant.

        Raises RequestError, OverloadedError, EngineError, AuthenticationError, RateLimitError.
        """
        call, caller = current_call(), CALLER.get()
        if caller is None:
            return await self._submit(call, request)
        if call is not None:
            call.tenant = caller.tenant
        return await caller.submit(request, partial(self._submit, call))

    async def _submit(self, call: Call | None, request: Request) -> AsyncStream:
        stream = await self._engine.submit(request, partial(self._ended, call))
        if call is not None:
            call.submitted(request)
        return stream

    def _ended(self, call: Call | None, record: RequestRecord) -> None:
        self.metrics.observe(record)
        if call is not None:
            call.ended(record)

    async def warm_up(self) -> None:
        """Load the model if that is still to do, and run one request on each engine, so that no
        caller waits for first times.

        Raises what `open_engine` does.
        """
        if isinstance(self._engine, LoadingEngine):
            await asyncio.to_thread(self._load)
        token_id = self.tokenizer.bos_id or 0
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        # Not by `submit`: first times are no caller's, and would spoil the histograms.
        engine = self._engine
        for one in engine.engines if isinstance(engine, Replicas) else (engine,):
            async for _ in await one.submit(Request([token_id, token_id], params)):
                pass
        self._warm = True

    @property
    def not_ready(self) -> str | None:
        """Why requests should go elsewhere; None if they are welcome."""
        return _SHUTTING_DOWN if self._leaving else self._refusal

    @property
    def _refusal(self) -> str | None:
        """Why requests are refused; None if they are not."""
        if not self._warm:
            return LOADING
        if self._draining:
            return _SHUTTING_DOWN
        if (broken := self.stats().broken) is not None:
            return f"the engine stopped working: {broken}"
        silent_s = time.monotonic() - self._engine.heartbeat_s
        if self._engine.busy and silent_s > self._heartbeat_timeout_s:
            return "the engine does not move"
        return None

    def check_ready(self) -> None:
        """Raises EngineError if requests are refused."""
        if (reason := self._refusal) is not None:
            raise EngineError(reason)

    def stats(self) -> EngineStats:
        """What the engine is doing and has done."""
        return self._engine.stats()

    def leave(self) -> None:
        """Not ready any more, so that no more requests are sent here; those that come still run."""
        self._leaving = True

    async def drain(self, timeout_s: float) -> None:
        """No new requests; running ones finish, or end with an error when time is over."""
        self._draining = True
        await self._engine.drain(timeout_s)

    async def close(self) -> None:
        """End every request with an error and give everything back."""
        self._draining = True
        await self._engine.close()
