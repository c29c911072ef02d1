"""Token ids in, token ids out: prefill in chunks, decode step by step, stop where asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from ortolan.errors import EngineError, RequestError, UsageError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.kv_cache import KvCache
from ortolan.runtime.engine.model import FloatArray, Model
from ortolan.runtime.engine.packed import discard, packed_graphs
from ortolan.runtime.engine.sampler import Sampled, Sampler
from ortolan.runtime.engine.sampler_row import SamplerRow
from ortolan.runtime.engine.sessions import SessionSet, open_sessions
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.params import EngineConfig, FinishReason, Request
from ortolan.runtime.providers import Provider, find_provider


@dataclass(frozen=True)
class Step:
    """One token of an answer. finish_reason is set on the last, except for stops in text."""

    sampled: Sampled
    finish_reason: FinishReason | None
    cached_tokens: int  # of the prompt, whose KV was there already


# Kernels work on tiles of rows: attention on 2 * head_dim at a time, 4-bit products in float32 on
# 128. Where a tile has a single row left over, it is computed by other code, to other bits. All
# these tiles are multiples of 32.
_TILE = 32


def chunk_sizes(tokens: int, chunk: int) -> list[int]:
    """How a prompt of `tokens` is cut into prefill calls of about `chunk` tokens.

    No piece leaves a single row over in a kernel's last tile, or is a single row, unless the
    prompt has only one token: the same token computed in company has other bits (rule 1a). The
    cut moves by one or two tokens where it would.
    """
    sizes = []
    while tokens:
        size = min(chunk, tokens)
        if tokens - size == 1:
            size += -1 if size > 2 else 1
        if size % _TILE == 1 and size > 1:
            size -= 2
        sizes.append(size)
        tokens -= size
    return sizes


class Engine:
    """A bundle's sessions, KV slots and sampler. Not safe for use from several threads at once.

    Streams may be interleaved: each holds a slot until it ends or is closed.
    """

    def __init__(self, bundle: Bundle, config: EngineConfig, num_valid: int) -> None:
        model_config = bundle.manifest.model
        self.context = _context(config, model_config.max_context)
        use_threads(config.threads)
        provider = find_provider(config.provider, ort)
        sessions = _open_sessions(bundle, provider, config)
        # At accuracy level 1 a single row must not decode alone (rule 1d).
        min_rows = 2 if config.accuracy == "exact" else 1
        capacity = self.context + self.context % 2  # even, as padded chunks are
        cache = KvCache(model_config, config.max_slots * min_rows, capacity)
        self._chunk = config.prefill_chunk
        self._model = Model(model_config, sessions, cache, min_rows)
        self._cache = cache
        self._sampler = Sampler(sessions.sample, num_valid)
        self._num_valid = num_valid
        # Token ids whose KV prefill wrote at the start of each slot, kept for reuse (rule 1b).
        self._prefilled: dict[int, list[int]] = {}

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that can never run."""
        self._check_prompt(request.prompt_ids)
        request.params.check_against_model(self._model.config.vocab_size)
        if request.params.n > 1:
            raise RequestError(f"n is {request.params.n}; only 1 is supported")

    def _check_prompt(self, ids: Sequence[int]) -> None:
        vocab_size = self._model.config.vocab_size
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"the prompt holds the token id {token_id}; the model's ids are 0 to "
                    f"{vocab_size - 1}"
                )
        if len(ids) > self.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the context holds {self.context}; shorten it"
            )

    def stream(self, request: Request, end_ids: frozenset[int]) -> Iterator[Step]:
        """Generate until one of `end_ids`, max_tokens or the end of the context.

        Closing the iterator frees the slot. Raises RequestError or EngineError.
        """
        self.check(request)
        ids, params = list(request.prompt_ids), request.params
        limit = self.context - len(ids) + 1  # the last token is sampled, but never stored
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        if limit == 0:
            return
        row = SamplerRow(params, ids, self._num_valid)
        slot, cached = self._take_slot(ids)
        try:
            logits = self._prefill(slot, ids, cached)
            for produced in range(1, limit + 1):
                (sampled,) = self._sampler.sample(logits, (row,))
                if isinstance(sampled, EngineError):
                    raise sampled
                ended = sampled.token_id in end_ids
                reason: FinishReason | None = None
                if ended or produced == limit:
                    reason = "stop" if ended else "length"
                yield Step(sampled, reason, cached)
                if reason is not None:
                    return
                row.append(sampled.token_id)
                length = len(ids) + produced - 1
                logits = self._model.decode(slot, (sampled.token_id,), (length,))
        finally:
            self._cache.release(slot, keep=len(self._prefilled[slot]))

    def logits(self, token_ids: Sequence[int], positions: Sequence[int] | None) -> FloatArray:
        """Logits float32 [n, vocab] after each of `positions` (by default all), by prefill."""
        ids = list(token_ids)
        self._check_prompt(ids)
        wanted = list(range(len(ids))) if positions is None else list(positions)
        if any(not 0 <= position < len(ids) for position in wanted):
            raise RequestError(f"positions must be from 0 to {len(ids) - 1}")
        result: FloatArray = np.empty((len(wanted), self._model.config.vocab_size), np.float32)
        slot, _ = self._take_slot([])
        try:
            start = 0
            for size in chunk_sizes(len(ids), self._chunk):
                places = [i for i, p in enumerate(wanted) if start <= p < start + size]
                index = [wanted[i] - start for i in places] or [size - 1]
                chunk = ids[start : start + size]
                logits = self._model.prefill(slot, [chunk], [start], [index])
                if places:
                    result[places] = logits[0]
                start += size
        finally:
            self._cache.release(slot)
        return result

    def _take_slot(self, ids: list[int]) -> tuple[int, int]:
        """The free slot that shares the longest prefix with `ids`, and how much of it is reused."""
        stride = self._model.min_rows  # the rows after a slot idle beside it
        free = [slot for slot in self._cache.free_slots() if slot % stride == 0]
        if not free:
            raise EngineError(
                f"all {self._cache.slots // stride} slots are in use; "
                "finish or close a stream first, or raise max_slots"
            )
        # At least two tokens run again: a one-token chunk would change the bits (rule 1a).
        most = max(len(ids) - 2, 0)
        reuse = {slot: min(_common(self._prefilled.get(slot, []), ids), most) for slot in free}
        slot = max(free, key=lambda slot: (reuse[slot], -len(self._prefilled.get(slot, []))))
        self._cache.acquire(slot)
        self._prefilled[slot] = ids[: reuse[slot]]
        return slot, reuse[slot]

    def _prefill(self, slot: int, ids: list[int], start: int) -> FloatArray:
        """Read ids from `start` on; logits [1, vocab] after the last."""
        for size in chunk_sizes(len(ids) - start, self._chunk):
            chunk = ids[start : start + size]
            logits = self._model.prefill(slot, [chunk], [start], [[size - 1]])
            start += size
            if size > 1:  # a single row has other bits, which only its own prompt may read
                self._prefilled[slot] = ids[:start]
        last: FloatArray = logits[0]
        return last


def _open_sessions(bundle: Bundle, provider: Provider, config: EngineConfig) -> SessionSet:
    """Sessions from the packed cache, made anew where it turns out to be damaged."""
    packed = packed_graphs(bundle, provider, config.accuracy, config.cache_dir)
    try:
        return open_sessions(bundle, provider, config.accuracy, packed)
    except EngineError:
        if packed is None:
            raise
        discard(packed)
    packed = packed_graphs(bundle, provider, config.accuracy, config.cache_dir)
    return open_sessions(bundle, provider, config.accuracy, packed)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def _context(config: EngineConfig, bundle_context: int) -> int:
    if config.max_context is None:
        return bundle_context
    if not 2 <= config.max_context <= bundle_context:
        raise UsageError(
            f"max_context is {config.max_context}; this bundle allows 2 to {bundle_context}"
        )
    return config.max_context
