"""What an execution provider tells the engine about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

Dtype = Literal["float32", "float16", "bfloat16"]
Flavor = Literal["gqa", "onnx"]


@dataclass(frozen=True)
class Capabilities:
    """What a provider's kernels and memory can do; the engine adapts to it.

    ragged_prefill: GroupQueryAttention takes query_seqlens, so several prompts share a call;
    without it prompts are read one at a time.
    packs_weights: an optimized, prepacked form can be saved and memory-mapped.
    in_place_kv: past and present may be one buffer; without it every step copies the cache.
    slices: a part of an array in its memory can be bound, as on the host. Without it decode runs
    over all slots, and a graph moves them.
    ragged_decode: rows of different lengths decode in one call; without it one call each.
    most_prefill_tokens: most tokens of one prefill call that come out right; None: any number.
    int8_kv: attention reads a quantized cache. flavors, dtypes: of the bundles that it runs.
    """

    ragged_prefill: bool = False
    packs_weights: bool = False
    in_place_kv: bool = True
    slices: bool = False
    ragged_decode: bool = True
    most_prefill_tokens: int | None = None
    int8_kv: bool = False
    flavors: tuple[Flavor, ...] = ("gqa", "onnx")
    dtypes: tuple[Dtype, ...] = ("float32",)


@dataclass(frozen=True)
class Provider:
    """An execution provider. `ort_name` is ONNX Runtime's name for it.

    device: the name by which outputs are bound to its memory, "cpu" where it works on host memory.
    device_id: which of its devices.
    distribution: the package on PyPI that has it; remedy: what to do where it cannot run.
    session_config: config entries of every session; options: the provider's own.
    memory_pattern: whether its sessions may plan memory ahead.
    """

    name: str
    ort_name: str
    capabilities: Capabilities
    distribution: str
    remedy: str
    device: str = "cpu"
    device_id: int = 0
    session_config: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_pattern: bool = True

    @property
    def on_host(self) -> bool:
        """Whether what it binds is host memory, which numpy reads and writes."""
        return self.device == "cpu"

    def with_options(self, options: Mapping[str, str]) -> Provider:
        """The same with a user's options laid over its own."""
        device_id = int(options.get("device_id", self.device_id))
        return replace(self, options={**self.options, **options}, device_id=device_id)

    def open_session(self, ort: ModuleType, model: bytes | str, options: Any) -> Any:
        """An InferenceSession of this module `ort` on the provider, without any other.

        options: SessionOptions. What goes wrong is raised as ONNX Runtime raises it.
        """
        if not self.memory_pattern:
            options.enable_mem_pattern = False
        return ort.InferenceSession(
            model,
            options,
            providers=[(self.ort_name, dict(self.options))],
            enable_fallback=0,  # or a provider that fails to start is replaced by the CPU
        )
