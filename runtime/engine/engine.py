"""The engine: many requests share the graphs, and none can tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ortolan.errors import CancelledError, EngineError, OverloadedError, RequestError
from ortolan.runtime.engine.chunks import chunk_sizes
from ortolan.runtime.engine.decode import DecodePhase
from ortolan.runtime.engine.device_logits import on_host
from ortolan.runtime.engine.emit import Emitter
from ortolan.runtime.engine.life import Choice, RequestHandle, State
from ortolan.runtime.engine.pace import Pace, attention_share
from ortolan.runtime.engine.prefill import PrefillPhase
from ortolan.runtime.engine.prefix_cache import PrefixCache
from ortolan.runtime.engine.sampler_row import FloatArray, SamplerRow
from ortolan.runtime.engine.scheduler import Scheduler
from ortolan.runtime.engine.seams import ModelSeam, SamplerSeam
from ortolan.runtime.params import EngineConfig, Request, TokenEvent
from ortolan.runtime.text.answer import AnswerText
from ortolan.runtime.text.no_tokenizer import NoTokenizer, no_text
from ortolan.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineStats:
    """The engine at a moment. Counts are since its start, everything else is now.

    ended: stop, length, cancelled, timed out, failed -> choices that ended so.
    broken: why the engine accepts nothing any more, None while it works.
    phase_seconds: prefill, decode (the model's calls), sample (to the readers' taking of events),
    other -> seconds that steps have spent so.
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
    ended: dict[str, int]
    broken: str | None
    phase_seconds: dict[str, float] = field(default_factory=dict)


class Engine:
    """Admits requests, reads prompts in chunks, decodes all running rows together.

    Not safe for use from several threads at once. A request's tokens and logprobs are those it
    would have had alone, bit for bit, whatever else is running.

    max_context: tokens that a slot holds. kv_budget: most tokens whose KV running requests may
    hold together. prefix: KV of earlier prompts; None: nothing is kept. checks: verify the
    invariants after every step, for tests.
    """

    def __init__(
        self,
        model: ModelSeam,
        sampler: SamplerSeam,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        max_context: int,
        kv_budget: int,
        prefix: PrefixCache | None,
        clock: Callable[[], float] = time.perf_counter,
        checks: bool = False,
    ) -> None:
        self.context = min(max_context, kv_budget)
        self._max_context = max_context
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._num_valid = min(tokenizer.vocab_size, model.config.vocab_size)
        self._clock = clock
        self._checks = checks
        self._steps = 0
        self._stepping = False
        self._step_seconds = 0.0
        self._phase_seconds: dict[str, float] = {}
        self._scheduler = Scheduler(model.cache, config, kv_budget, prefix, clock)
        self._emitter = Emitter(sampler, tokenizer, self._scheduler, clock)
        pace = Pace(config, attention_share(model.config))
        whole = config.whole_prompt if config.gap_ms is None else 0
        self._prefill = PrefillPhase(
            model, self._scheduler, self._emitter, pace, config.prefill_chunk, whole, clock
        )
        self._decode = DecodePhase(model, self._scheduler, self._emitter, pace, clock)
        self._note_seconds(0.0)

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that can never run."""
        self._check_prompt(request.prompt_ids)
        request.params.check_against_model(self._model.config.vocab_size)
        if request.params.stop and isinstance(self._tokenizer, NoTokenizer):
            raise no_text()

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request. Its events come as steps are made.

        Raises RequestError if it can never run, OverloadedError if too much is waiting, and
        EngineError if the engine is broken.
        """
        scheduler, params = self._scheduler, request.params
        if scheduler.broken is not None:
            raise EngineError(f"the engine stopped working: {scheduler.broken}")
        self.check(request)
        self._check_room(request)
        limit = (
            self.context - len(request.prompt_ids) + 1
        )  # the last token is sampled, but never stored
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self._tokenizer.eos_ids)
        handle = RequestHandle(request, limit=limit, ends=ends, began=self._clock())
        for index in range(params.n):
            row = SamplerRow(params, request.prompt_ids, self._num_valid, index)
            text = AnswerText(self._tokenizer, request)
            handle.choices.append(Choice(handle, index, row, text))
        scheduler.enqueue(handle)
        if limit == 0 and params.prompt_logprobs is None:
            self._emitter.finish(handle.choices[0], "length")
        return handle

    def has_room(self, request: Request) -> bool:
        """Whether `submit` would not find too much waiting."""
        try:
            self._check_room(request)
        except OverloadedError:
            return False
        return True

    def cancel(self, handle: RequestHandle, error: CancelledError | None = None) -> None:
        """End a request now; harmless if it has ended already."""
        error = error or CancelledError("the request was cancelled")
        self._scheduler.end(handle, State.CANCELLED, error)
        if not self._scheduler.busy:  # there may be no further step
            self._scheduler.residents.return_pages()

    def stop(self, reason: str) -> None:
        """End every request and accept none any more: something is broken."""
        self._scheduler.stop(reason)
        self._scheduler.residents.return_pages()

    def step(self) -> bool:
        """Admit, read a chunk's worth of prompts, decode all running rows, sample, emit.

        Returns whether anything is left to do. Where it is broken off, by an interrupt or a fault
        of ours, running requests end with that: nobody knows which of them had their token.
        """
        self._check_between_steps()
        self._steps += 1
        self._stepping = True
        try:
            self._step()
        except BaseException as exc:
            self._scheduler.break_off(f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self._stepping = False
        if self._checks:
            self._scheduler.verify()
        return self._scheduler.busy

    def _step(self) -> None:
        began = self._clock()
        self._scheduler.expire(began)
        self._scheduler.make_room()
        self._scheduler.admit()
        read = self._prefill.run(began)
        self._decode.run(beside_prompt=read)
        if self._scheduler.suspicious:
            self._prefill.probe()
        self._scheduler.residents.return_pages()
        self._note_seconds(self._clock() - began)

    def _note_seconds(self, step_seconds: float) -> None:
        self._step_seconds += step_seconds
        model_s, sample_s = self._prefill.seconds + self._decode.seconds, self._emitter.seconds
        # Whoever reads them on another thread must not find a sum that is a step behind its parts.
        self._phase_seconds = {
            "prefill": self._prefill.seconds,
            "decode": self._decode.seconds,
            "sample": sample_s,
            "other": self._step_seconds - model_s - sample_s,
        }

    def stream(self, request: Request) -> Iterator[TokenEvent]:
        """A request's events, making steps as long as it takes; closing the iterator cancels it.

        Raises RequestError at once; while iterating, what `submit` raises or the request fails of.
        """
        self.check(request)
        return self._follow(request)

    def _follow(self, request: Request) -> Iterator[TokenEvent]:
        handle = self.submit(request)
        try:
            while handle.events or not handle.done:
                while handle.events:
                    yield handle.events.popleft()
                if not handle.done:
                    self.step()
            if handle.error is not None:
                raise handle.error
        finally:
            self.cancel(handle)

    def stats(self) -> EngineStats:
        """What the engine is doing and has done."""
        scheduler, prefix = self._scheduler, self._scheduler.prefix
        return EngineStats(
            running=len(scheduler.residents),
            waiting=scheduler.waiting,
            kv_tokens=scheduler.residents.kv_tokens,
            kv_budget_tokens=scheduler.residents.budget,
            steps=self._steps,
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prefill.prompt_tokens,
            completion_tokens=self._emitter.completion_tokens,
            prefix_blocks=prefix.blocks if prefix else 0,
            prefix_capacity_blocks=prefix.capacity if prefix else 0,
            prefix_query_tokens=prefix.counts.query_tokens if prefix else 0,
            prefix_hit_tokens=prefix.counts.hit_tokens if prefix else 0,
            ended=dict(scheduler.ended),
            broken=scheduler.broken,
            phase_seconds=self._phase_seconds,
        )

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, but for what is in use."""
        if self._scheduler.prefix is not None:
            self._scheduler.prefix.clear()

    def logits(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | None,
        decoded_from: int | None = None,
    ) -> FloatArray:
        """Logits float32 [n, vocab] after each of `positions` (by default all), by prefill.

        decoded_from: the tokens from this one on are fed one by one to decode.
        """
        self._check_between_steps()
        ids = list(token_ids)
        self._check_prompt(ids)
        wanted = list(range(len(ids))) if positions is None else list(positions)
        if any(not 0 <= position < len(ids) for position in wanted):
            raise RequestError(f"positions must be from 0 to {len(ids) - 1}")
        slot = self._scheduler.residents.free_slot()
        if slot is None:
            raise EngineError("all slots are in use; finish or close a stream first")
        result: FloatArray = np.empty((len(wanted), self._model.config.vocab_size), np.float32)
        start = 0
        try:
            for size in chunk_sizes(len(ids[:decoded_from]), self._config.prefill_chunk):
                places = [i for i, p in enumerate(wanted) if start <= p < start + size]
                index = [wanted[i] - start for i in places] or [size - 1]
                chunk = ids[start : start + size]
                logits = self._model.prefill(slot, [chunk], [start], [index])
                if places:
                    result[places] = on_host(logits[0])
                start += size
            for position in range(start, len(ids)):
                logits = self._decode.logits_of(slot, ids[position], position)
                for i, place in enumerate(wanted):
                    if place == position:
                        result[i] = on_host(logits)[0]
                start += 1
        finally:
            self._model.cache.discard(slot, start)
        return result

    def _check_between_steps(self) -> None:
        # Readers are called from within a step, whose logits another call would overwrite.
        if self._stepping:
            raise EngineError("a step is under way; its readers may submit and cancel, no more")

    def _check_prompt(self, ids: Sequence[int]) -> None:
        vocab_size = self._model.config.vocab_size
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if len(ids) > self._max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the context holds {self._max_context}; "
                "shorten it"
            )
        if len(ids) > self.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the KV budget holds {self.context}; "
                "shorten it, or raise kv_tokens"
            )
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"the prompt holds the token id {token_id}; the model's ids are 0 to "
                    f"{vocab_size - 1}"
                )

    def _check_room(self, request: Request) -> None:
        waiting = self._scheduler.waiting
        # A guess at when there will be room: a second per round of waiting answers.
        retry_after_s = 1.0 + waiting // self._config.max_slots
        self._scheduler.queue.check_room(
            waiting, request.params.n, len(request.prompt_ids), retry_after_s
        )
