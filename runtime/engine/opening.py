"""From a bundle to an engine: threads, sessions, KV cache, budgets."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort

from ortolan.errors import EngineError, UsageError
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_model import DeviceModel
from ortolan.runtime.engine.device_opening import check_fit, open_device_model
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.kv_cache import KvCache, bytes_per_token, padded_capacity
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.packed import discard, packed_graphs
from ortolan.runtime.engine.prefix_cache import PrefixCache
from ortolan.runtime.engine.sampler import Sampler
from ortolan.runtime.engine.sessions import SessionSet, decode_graph, open_sessions
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.machine import free_memory_bytes
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider, configured_provider
from ortolan.runtime.text.tokenizer import Tokenizer

# Parts of the memory that is free when a model is loaded, where the config says nothing.
_KV_PART = 0.5
_PREFIX_PART = 0.1


def open_engine(
    bundle: Bundle, config: EngineConfig, tokenizer: Tokenizer, *, checks: bool = False
) -> Engine:
    """An engine on a bundle. Raises ProviderError, UsageError, EngineError, BundleError."""
    model_config = bundle.manifest.model
    context = context_of(config, model_config.max_context)
    use_threads(config.threads)
    provider = configured_provider(config, ort)
    check_fit(provider, bundle.manifest, config)
    sessions = _open_sessions(bundle, provider, config)
    num_valid = min(tokenizer.vocab_size, model_config.vocab_size)
    token_bytes = bytes_per_token(model_config)
    free = free_memory_bytes()
    kv_budget = config.kv_tokens
    if kv_budget is None:
        kv_budget = max(int(free * _KV_PART) // token_bytes, 2)
    prefix_bytes = int(free * _PREFIX_PART)
    if config.prefix_cache_mb is not None:
        prefix_bytes = config.prefix_cache_mb * 2**20
    model: Model | DeviceModel[Any]
    device, prefix = None, None
    if provider.on_host and provider.capabilities.in_place_kv:
        model = open_host_model(model_config, sessions, config, context)
        prefix = PrefixCache(model.cache, prefix_bytes)
    else:  # where the prefix cache could not copy anything
        device = Device(provider)
        model = open_device_model(model_config, sessions, config, context, device)
    return Engine(
        model,
        Sampler(sessions.sample, num_valid, device),
        tokenizer,
        config,
        max_context=context,
        kv_budget=min(kv_budget, config.max_slots * context),
        prefix=prefix if prefix is not None and prefix.capacity else None,
        checks=checks,
    )


def open_host_model(
    model: ModelConfig, sessions: SessionSet, config: EngineConfig, context: int
) -> Model:
    """The decoder over a KV cache in host memory."""
    # At accuracy level 1 a single row must not decode alone (rule 1d).
    min_rows = 2 if config.accuracy == "exact" else 1
    capacity = padded_capacity(context, model.head_dim)
    cache = KvCache(model, max(config.max_slots, min_rows), capacity)
    return Model(model, sessions, cache, min_rows)


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


def context_of(config: EngineConfig, bundle_context: int) -> int:
    """Tokens of a slot. Raises UsageError if the bundle does not allow what is asked for."""
    if config.max_context is None:
        return bundle_context
    if not 2 <= config.max_context <= bundle_context:
        raise UsageError(
            f"max_context is {config.max_context}; this bundle allows 2 to {bundle_context}"
        )
    return config.max_context
