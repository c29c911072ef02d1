"""From a bundle to an engine: threads, sessions, KV cache, budgets."""

from __future__ import annotations

import logging

import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.kv_cache import KvCache
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.packed import discard, packed_graphs
from ortolan.runtime.engine.prefix_cache import PrefixCache
from ortolan.runtime.engine.sampler import Sampler
from ortolan.runtime.engine.sessions import SessionSet, open_sessions
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.memory import memory_found, process_bytes, return_freed_memory
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.plan import Plan, min_rows, plan_memory, rows_of_cache
from ortolan.runtime.providers import Provider, find_provider
from ortolan.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def open_engine(
    bundle: Bundle, config: EngineConfig, tokenizer: Tokenizer, *, checks: bool = False
) -> Engine:
    """An engine on a bundle. Raises ProviderError, UsageError, EngineError, BundleError."""
    model = bundle.manifest.model
    use_threads(config.threads)
    provider = find_provider(config.provider, ort)
    plan = _plan(bundle, config, provider)
    sessions = _open_sessions(bundle, provider, config)
    return_freed_memory()
    cache = KvCache(model, rows_of_cache(config), plan.capacity)
    prefix = PrefixCache(cache, plan.prefix_bytes)
    return Engine(
        Model(model, sessions, cache, min_rows(config)),
        Sampler(sessions.sample, min(tokenizer.vocab_size, model.vocab_size)),
        tokenizer,
        config,
        max_context=plan.context,
        kv_budget=plan.kv_tokens,
        prefix=prefix if prefix.capacity else None,
        checks=checks,
    )


def _plan(bundle: Bundle, config: EngineConfig, provider: Provider) -> Plan:
    """What the engine may hold, of the memory that is free before anything is loaded."""
    memory = memory_found() if provider.on_host else None
    plan = plan_memory(bundle.manifest, config, provider, memory, process_bytes())
    if plan.is_too_large:
        assert memory is not None
        logger.warning(
            "memory may run out; see what takes it with: ortolan plan",
            extra={"needs_mb": plan.total // 10**6, "has_mb": memory.bytes // 10**6},
        )
    return plan


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
