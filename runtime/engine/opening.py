"""From a bundle to an engine, or several: threads, sessions, KV cache, budgets."""

from __future__ import annotations

import logging
from typing import Any

import onnxruntime as ort

from ortolan.errors import EngineError, UsageError
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
from ortolan.runtime.machine import cpu_shares, stay_on, usable_cores
from ortolan.runtime.memory import memory_found, process_bytes, return_freed_memory
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.plan import Plan, plan_memory
from ortolan.runtime.providers import Provider, configured_provider
from ortolan.runtime.providers.placement import CPU
from ortolan.runtime.row_pairs import (
    computes_pairs,
    positions_of_slot,
    row_multiple,
    rows_of_cache,
)
from ortolan.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def open_engine(
    bundle: Bundle, config: EngineConfig, tokenizer: Tokenizer, *, checks: bool = False
) -> Engine:
    """An engine on a bundle. Raises ProviderError, UsageError, EngineError, BundleError."""
    use_threads(config.threads)
    provider = configured_provider(config, ort)
    check_fit(provider, bundle.manifest, config)
    plan = _plan(bundle, config, provider)
    return _opened(bundle, config, tokenizer, provider, plan, checks)


def check_replicas(config: EngineConfig, replicas: int) -> None:
    """Raises UsageError where so many engines cannot share what there is."""
    if replicas == 1:
        return
    threads = config.threads or usable_cores()
    if replicas > threads:
        raise UsageError(
            f"replicas is {replicas}, and there are {threads} threads; each needs one of its own, "
            "so lower replicas or raise threads"
        )
    check_sharing(configured_provider(config, ort), replicas)


def check_sharing(provider: Provider, replicas: int) -> None:
    """Raises UsageError where several engines would not share one set of weights."""
    if replicas > 1 and provider.ort_name != CPU:
        raise UsageError(
            f"replicas is {replicas}, and provider {provider.name} would hold the weights as many "
            "times; leave it at 1, or take provider cpu"
        )


def open_replicas(
    bundle: Bundle, config: EngineConfig, tokenizer: Tokenizer, replicas: int
) -> list[tuple[Engine, frozenset[int] | None]]:
    """Engines that share threads, weights and memory evenly, each with the processors it is for.

    The thread that runs an engine, and with it the memory that it fills, is to stay on those
    (None: on any); its sessions' own threads do already. Raises what `open_engine` does.
    """
    check_replicas(config, replicas)
    use_threads(config.threads, replicas)
    if replicas == 1:
        return [(open_engine(bundle, config, tokenizer), None)]
    provider = configured_provider(config, ort)
    plan = _plan(bundle, config, provider, replicas)
    shares = cpu_shares(replicas)
    found: list[tuple[Engine, frozenset[int] | None]] = []
    try:
        for index in range(replicas):
            share = shares[index] if shares else None
            stay_on(share)
            found.append((_opened(bundle, config, tokenizer, provider, plan), share))
    finally:
        stay_on(frozenset().union(*shares) if shares else None)
    return found


def _opened(
    bundle: Bundle,
    config: EngineConfig,
    tokenizer: Tokenizer,
    provider: Provider,
    plan: Plan,
    checks: bool = False,
) -> Engine:
    sessions = _open_sessions(bundle, provider, config)
    return_freed_memory()
    num_valid = min(tokenizer.vocab_size, bundle.manifest.model.vocab_size)
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


def _plan(bundle: Bundle, config: EngineConfig, provider: Provider, replicas: int = 1) -> Plan:
    """What the engine may hold, of the memory that is free before anything is loaded."""
    memory = memory_found() if provider.on_host else None
    plan = plan_memory(
        bundle.manifest, config, provider, memory, process_bytes(), replicas=replicas
    )
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
    positions = positions_of_slot(manifest, config, context)
    capacity = padded_capacity(positions, model.head_dim, kv_dtype)
    cache = KvCache(model, rows_of_cache(manifest, config), capacity, kv_dtype)
    multiple = row_multiple(manifest, config)
    return Model(model, sessions, cache, multiple, pairs=computes_pairs(manifest, config))


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
