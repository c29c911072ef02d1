"""From a bundle to an engine: threads, sessions, KV cache, budgets."""

from __future__ import annotations

import logging
from typing import Any

import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.graphs.manifest import Manifest
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_model import DeviceModel
from ortolan.runtime.engine.device_opening import check_fit, open_device_model
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.kv_cache import KvCache, padded_capacity
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.packed import discard, packed_graphs
from ortolan.runtime.engine.prefix_cache import PrefixCache
from ortolan.runtime.engine.sampler import Sampler
from ortolan.runtime.engine.sessions import SessionSet, decode_graph, open_sessions
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.memory import memory_found, process_bytes, return_freed_memory
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.plan import Plan, min_rows, plan_memory, rows_of_cache
from ortolan.runtime.providers import Provider, configured_provider
from ortolan.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def open_engine(
    bundle: Bundle, config: EngineConfig, tokenizer: Tokenizer, *, checks: bool = False
) -> Engine:
    """An engine on a bundle. Raises ProviderError, UsageError, EngineError, BundleError."""
    model_config = bundle.manifest.model
    use_threads(config.threads)
    provider = configured_provider(config, ort)
    check_fit(provider, bundle.manifest, config)
    plan = _plan(bundle, config, provider)
    sessions = _open_sessions(bundle, provider, config)
    return_freed_memory()
    num_valid = min(tokenizer.vocab_size, model_config.vocab_size)
    model: Model | DeviceModel[Any]
    device, prefix = None, None
    if provider.on_host and provider.capabilities.in_place_kv:
        model = open_host_model(bundle.manifest, sessions, config, plan.context)
        prefix = PrefixCache(model.cache, plan.prefix_bytes)
    else:  # where the prefix cache could not copy anything
        device = Device(provider)
        model = open_device_model(bundle.manifest, sessions, config, plan.context, device)
    return Engine(
        model,
        Sampler(sessions.sample, num_valid, device),
        tokenizer,
        config,
        max_context=plan.context,
        kv_budget=plan.kv_tokens,
        prefix=prefix if prefix is not None and prefix.capacity else None,
        checks=checks,
    )


def _plan(bundle: Bundle, config: EngineConfig, provider: Provider) -> Plan:
    """What the engine may hold, of the memory that is free before anything is loaded."""
    memory = memory_found() if provider.on_host else None
    plan = plan_memory(bundle.manifest, config, provider, memory, process_bytes())
    if memory is not None and plan.is_too_large:
        logger.warning(
            "memory may run out; see what takes it with: ortolan plan",
            extra={"needs_mb": plan.total // 10**6, "has_mb": memory.bytes // 10**6},
        )
    return plan


def open_host_model(
    manifest: Manifest, sessions: SessionSet, config: EngineConfig, context: int
) -> Model:
    """The decoder over a KV cache in host memory."""
    model, kv_dtype = manifest.model, manifest.dtypes.kv
    capacity = padded_capacity(context, model.head_dim, kv_dtype)
    cache = KvCache(model, rows_of_cache(config), capacity, kv_dtype)
    return Model(model, sessions, cache, min_rows(config))


def _open_sessions(bundle: Bundle, provider: Provider, config: EngineConfig) -> SessionSet:
    """Sessions from the packed cache, made anew where it turns out to be damaged."""
    decode = decode_graph(bundle.manifest, config)
    packed = packed_graphs(bundle, provider, config.accuracy, config.cache_dir, decode)
    try:
        return open_sessions(bundle, provider, config.accuracy, packed, decode)
    except EngineError:
        if packed is None:
            raise
        discard(packed)
    packed = packed_graphs(bundle, provider, config.accuracy, config.cache_dir, decode)
    return open_sessions(bundle, provider, config.accuracy, packed, decode)
