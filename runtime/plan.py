"""How much memory a bundle takes, said before it is loaded; what an engine may hold follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ortolan.errors import UsageError
from ortolan.graphs.contract import DECODE
from ortolan.graphs.manifest import WEIGHTS_NAME, Manifest
from ortolan.runtime.engine.kv_cache import bytes_per_token, element_bytes, padded_capacity
from ortolan.runtime.engine.sessions import packs_weights, prefill_graph
from ortolan.runtime.memory import Memory
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider
from ortolan.runtime.row_pairs import positions_of_slot, rows_of_cache
from ortolan.runtime.weight_sizes import WeightSizes, weight_sizes

Place = Literal["disk", "host", "device"]

# Of memory that the whole machine shares, this much is taken where nobody says how much.
_SHARE_OF_MACHINE = 0.6
# Of what is left for KV and for the prefix cache, this goes to the latter.
_PREFIX_PART = 1 / 6
_MARGIN_PART = 0.05  # of what is estimated; KV is known to the byte
_LEAST_KV_TOKENS = 256  # where memory is short, an engine still answers something

# Measured with ONNX Runtime 1.32 by benchmarks/plan_memory.py.
_SESSION_BYTES = 11.5  # of objects for each byte of a graph's file, both graphs counted
_SESSION_LEAST = 18 << 20  # most of it the code that a model runs, mapped as it is first used
_PACKING = 1.35  # of the packed file's bytes, held in memory before they are written
# Arenas keep what a call allocated node by node, and what the next of its shape plans ahead.
_ARENA_COPIES = 2.5
_SCORED_POSITIONS = 64  # logits of a call where a prompt is scored; see engine/prefill.py


@dataclass(frozen=True)
class Part:
    """Bytes of one kind, where they are, and what they are."""

    name: str
    bytes: int
    place: Place
    what: str


@dataclass(frozen=True)
class Plan:
    """What a bundle takes with these settings.

    slots, context: as asked for. capacity: positions that a slot has address space for.
    kv_tokens: most tokens whose KV is held; prefix_bytes: KV of earlier prompts.
    room: bytes for KV, beside all else. replicas: engines, each of which has all of these to
    itself. memory: what there is for all; None where nobody knows.
    parts: memory in use when slots and caches are full. disk: files.
    first_load: bytes of memory at the most while weights are packed, which the first load does.
    """

    provider: str
    slots: int
    context: int
    capacity: int
    token_bytes: int
    kv_tokens: int
    prefix_bytes: int
    room: int
    replicas: int
    memory: Memory | None
    parts: tuple[Part, ...]
    disk: tuple[Part, ...]
    first_load: int

    @property
    def total(self) -> int:
        """Bytes of memory in use when all slots and caches are full, the margin included."""
        return sum(part.bytes for part in self.parts)

    @property
    def total_where_kv_is(self) -> int:
        """The same, of the host or of the device alone, whichever has the KV."""
        (place,) = (part.place for part in self.parts if part.name == "KV")
        return sum(part.bytes for part in self.parts if part.place == place)

    @property
    def tokens_wanted(self) -> int:
        """Tokens of all slots when they are full."""
        return self.slots * self.context

    @property
    def tokens_that_fit(self) -> int:
        """Tokens whose KV has room."""
        return max(self.room, 0) // self.token_bytes

    @property
    def slots_that_fit(self) -> int:
        """Slots of the whole context whose KV has room."""
        return self.tokens_that_fit // self.context

    @property
    def is_too_large(self) -> bool:
        """Whether memory cannot hold it all."""
        return self.memory is not None and self.total_where_kv_is > self.memory.bytes


def context_of(config: EngineConfig, bundle_context: int) -> int:
    """Tokens of a slot. Raises UsageError if the bundle does not allow what is asked for."""
    if config.max_context is None:
        return bundle_context
    if not 2 <= config.max_context <= bundle_context:
        raise UsageError(
            f"max_context is {config.max_context}; this bundle allows 2 to {bundle_context}"
        )
    return config.max_context


def plan_memory(
    manifest: Manifest,
    config: EngineConfig,
    provider: Provider,
    memory: Memory | None,
    process_bytes: int,
    *,
    replicas: int = 1,
) -> Plan:
    """The plan of an engine on that bundle, or of several that share weights and memory evenly.

    memory: of the place where the provider keeps weights and KV: the host's, or its device's.
    None: not known; all slots are then planned for. process_bytes: what the process holds
    without a model. Raises UsageError for a context that the bundle does not allow.
    """
    model = manifest.model
    context = context_of(config, model.max_context)
    weights = weight_sizes(manifest, config.accuracy)
    place: Place = "host" if provider.on_host else "device"
    around = _around_kv(manifest, config, provider, weights, process_bytes, replicas)
    taken = sum(part.bytes for part in around if part.place == place)
    token_bytes = bytes_per_token(model, manifest.dtypes.kv)
    most = config.max_slots * context
    prefix_bytes, room = 0, most * token_bytes
    if memory is not None:
        prefix_bytes, room = _split(config, provider, (_usable(memory) - taken) // replicas)
    kv_tokens = config.kv_tokens
    if kv_tokens is None:
        kv_tokens = max(room // token_bytes, _LEAST_KV_TOKENS)
    kv_tokens = min(kv_tokens, most)
    held = kv_tokens
    if not _follows_tokens(provider):
        held = _all_positions(config, context, provider)
    kv_bytes = replicas * held * token_bytes
    kv = Part("KV", kv_bytes, place, "of running requests, when slots are full")
    earlier = "KV of earlier prompts, when it is full"
    prefix = Part("prefix cache", replicas * prefix_bytes, place, earlier)
    return Plan(
        provider=provider.name,
        slots=config.max_slots,
        context=context,
        capacity=padded_capacity(
            positions_of_slot(manifest, config, context), model.head_dim, manifest.dtypes.kv
        ),
        token_bytes=token_bytes,
        kv_tokens=kv_tokens,
        prefix_bytes=prefix_bytes,
        room=room,
        replicas=replicas,
        memory=memory,
        parts=(*around[:-1], kv, prefix, around[-1]),
        disk=_files(manifest, provider, weights),
        first_load=_first_load(manifest, provider, weights, process_bytes),
    )


def _usable(memory: Memory) -> int:
    return int(memory.bytes * _SHARE_OF_MACHINE) if memory.source == "machine" else memory.bytes


def _split(config: EngineConfig, provider: Provider, left: int) -> tuple[int, int]:
    """Bytes for the prefix cache, and for KV, of what is left for both."""
    prefix_bytes = int(max(left, 0) * _PREFIX_PART)
    if not _follows_tokens(provider):
        prefix_bytes = 0  # it copies from the host's array
    elif config.prefix_cache_mb is not None:
        prefix_bytes = config.prefix_cache_mb * 2**20
    return prefix_bytes, left - prefix_bytes


def _follows_tokens(provider: Provider) -> bool:
    """Whether the KV cache is the host's array, which takes memory as positions are written."""
    return provider.on_host and provider.capabilities.in_place_kv


def _all_positions(config: EngineConfig, context: int, provider: Provider) -> int:
    """Positions of a KV cache in a provider's own memory, which has it for all of them at once.

    One slot more is where prompts are read; see engine/device_kv.py.
    """
    copies = 1 if provider.capabilities.in_place_kv else 2
    return (config.max_slots + 1) * context * copies


def _around_kv(
    manifest: Manifest,
    config: EngineConfig,
    provider: Provider,
    weights: WeightSizes,
    process_bytes: int,
    replicas: int,
) -> list[Part]:
    """Everything but KV, the margin last."""
    place: Place = "host" if provider.on_host else "device"
    packs = packs_weights(provider)
    read = "mapped from the packed cache" if packs else "read from the bundle, by each session"
    graphs = sum(
        manifest.files[f"{graph}.onnx"].size for graph in (DECODE, prefill_graph(provider))
    )
    parts = [
        Part("process", process_bytes, "host", "Python, its libraries, the tokenizer"),
        Part("weights", weights.used * (1 if packs else 2), place, read),
        Part(
            "sessions",
            _SESSION_LEAST + replicas * int(graphs * _SESSION_BYTES),
            "host",
            "graphs as objects, and the code that runs them",
        ),
        Part(
            "activations",
            replicas * (_activations(manifest, config) + 2 * weights.unpacked),
            place,
            f"of calls of up to {config.prefill_chunk} tokens",
        ),
        Part(
            "logits",
            replicas * _logits(manifest, config),
            place,
            "and what sampling needs",
        ),
    ]
    margin = int(_MARGIN_PART * sum(part.bytes for part in parts if part.place == place))
    return [*parts, Part("margin", margin, place, f"{_MARGIN_PART:.0%} of what is estimated")]


def _activations(manifest: Manifest, config: EngineConfig) -> int:
    """Bytes of the two sessions' arenas after calls of the largest shape.

    Attention works through tiles, so the length of the context is not in it.
    """
    model = manifest.model
    context = context_of(config, model.max_context)
    tokens = max(min(config.prefill_chunk, context), rows_of_cache(manifest, config))
    queries, keys = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    # Gate and up as one matrix and apart, the activation, the product; models with offsets have
    # less of it at a time. Or q, k and v, and their turned copies. Beside either the residual
    # stream and its norms.
    has_offsets = any(group.precision.endswith("offsets") for group in manifest.weights)
    inner = (4.5 if has_offsets else 6) * model.intermediate_size
    number = element_bytes(manifest.dtypes.activations)
    wide = max(inner, 3 * queries + 4 * keys)
    return int(_ARENA_COPIES * tokens * (wide + 5 * model.hidden_size) * number)


def _logits(manifest: Manifest, config: EngineConfig) -> int:
    """Bytes of logits: of a decode call, of a prompt that is scored, and of what sampling makes."""
    positions = 2 * rows_of_cache(manifest, config) + max(_SCORED_POSITIONS, config.max_slots)
    return positions * manifest.model.vocab_size * 4


def _files(manifest: Manifest, provider: Provider, weights: WeightSizes) -> tuple[Part, ...]:
    bundle = Part(
        "bundle", sum(entry.size for entry in manifest.files.values()), "disk", "as exported"
    )
    if not packs_weights(provider):
        return (bundle,)
    what = "made by the first load, which takes twice as much for a while"
    return (bundle, Part("packed cache", weights.file, "disk", what))


def _first_load(
    manifest: Manifest, provider: Provider, weights: WeightSizes, process_bytes: int
) -> int:
    """Bytes at the most while weights are packed: the source mapped, the packed form in memory."""
    packed = weights.file * _PACKING if packs_weights(provider) else 2 * weights.used
    source = manifest.files[WEIGHTS_NAME].size
    return process_bytes + _SESSION_LEAST + source + int(packed)
