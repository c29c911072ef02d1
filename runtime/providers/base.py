"""What an execution provider tells the engine about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Capabilities:
    """What a provider's kernels can do; the engine adapts to it.

    ragged_prefill: GroupQueryAttention takes query_seqlens, so several prompts share a call.
    packs_weights: an optimized, prepacked form can be saved and memory-mapped.
    """

    ragged_prefill: bool
    packs_weights: bool


@dataclass(frozen=True)
class Provider:
    """An execution provider. `ort_name` is ONNX Runtime's name for it."""

    name: str
    ort_name: str
    capabilities: Capabilities
    remedy: str  # what to install or do where it cannot run
    session_config: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
