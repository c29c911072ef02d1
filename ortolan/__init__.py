"""Ortolan: Llama-style checkpoints as ONNX graphs, and tokens from them.

The names below are the public face. They are imported on first use (PEP 562), so that
`import ortolan.graphs.contract` or `ortolan --help` loads no numerical library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortolan.client.aio import AsyncClient
    from ortolan.client.sync import Client
    from ortolan.errors import OrtolanError
    from ortolan.graphs.manifest import Manifest, ModelConfig
    from ortolan.runtime.llm import LLM, load
    from ortolan.runtime.params import (
        Completion,
        EngineConfig,
        Request,
        SamplingParams,
        TokenEvent,
        Usage,
    )

# The one place that holds the version: pyproject.toml reads it from here.
__version__ = "0.1.0.dev0"

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "Completion",
    "EngineConfig",
    "Manifest",
    "ModelConfig",
    "OrtolanError",
    "Request",
    "SamplingParams",
    "TokenEvent",
    "Usage",
    "__version__",
    "load",
]

_HOME = {
    "AsyncClient": "ortolan.client.aio",
    "Client": "ortolan.client.sync",
    "LLM": "ortolan.runtime.llm",
    "load": "ortolan.runtime.llm",
    "Completion": "ortolan.runtime.params",
    "EngineConfig": "ortolan.runtime.params",
    "Request": "ortolan.runtime.params",
    "SamplingParams": "ortolan.runtime.params",
    "TokenEvent": "ortolan.runtime.params",
    "Usage": "ortolan.runtime.params",
    "Manifest": "ortolan.graphs.manifest",
    "ModelConfig": "ortolan.graphs.manifest",
    "OrtolanError": "ortolan.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # later look-ups no longer come through here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
