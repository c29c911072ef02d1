"""The registry of execution providers: one small module each, imported when asked for.

Other distributions add theirs by an entry point of the group `ortolan.providers`, which loads to a
`Provider`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from ortolan.errors import ProviderError
from ortolan.runtime.machine import usable_cores
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers.base import Capabilities, Provider
from ortolan.runtime.providers.plugin import is_library, plugin_provider

__all__ = [
    "Capabilities",
    "Provider",
    "builtin_providers",
    "configured_provider",
    "find_provider",
    "load_provider",
    "provider_names",
]

ENTRY_POINTS = "ortolan.providers"

_MODULES = {
    name: f"ortolan.runtime.providers.{name}"
    for name in ("cpu", "cuda", "directml", "openvino", "webgpu")
}
# What people call them elsewhere.
_OTHER_NAMES = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "dml": "directml",
    "directx": "directml",
    "intel": "openvino",
    "vulkan": "webgpu",
    "metal": "webgpu",
}


def provider_names() -> list[str]:
    """Our own providers' names, then those that other distributions have added."""
    return [*_MODULES, *_added()]


def builtin_providers() -> list[Provider]:
    """Our own providers."""
    return [load_provider(name) for name in _MODULES]


def load_provider(name: str) -> Provider:
    """What a provider says about itself, whether it can run here or not.

    Raises ProviderError, with the nearest name, for an unknown one, and for one that another
    distribution has added and that does not load.
    """
    if name in _MODULES:
        provider: Provider = import_module(_MODULES[name]).PROVIDER
        return provider
    if (entry := _added().get(name)) is not None:
        return _loaded(entry)
    raise ProviderError(f"provider {name!r} is unknown; {_hint(name)}")


def find_provider(
    name: str,
    onnxruntime: ModuleType,
    options: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
) -> Provider:
    """The provider of that name or plug-in library, which this ONNX Runtime has.

    options: a user's, laid over the provider's own. strict: see Provider.
    Raises ProviderError, with the nearest name or the remedy, rather than falling back to another;
    UsageError for an option that the provider does not take.
    """
    if is_library(name):
        provider: Provider = plugin_provider(name, onnxruntime, builtin_providers())
    else:
        provider = load_provider(name)
    if options:
        provider = provider.with_options(options)
    available = onnxruntime.get_available_providers()
    if not is_library(name) and provider.ort_name not in available:
        raise ProviderError(
            f"provider {name} cannot run here: this onnxruntime {onnxruntime.__version__} has no "
            f"{provider.ort_name} (it has {', '.join(available)}); {provider.remedy}"
        )
    return replace(provider, strict=strict)


def configured_provider(config: EngineConfig, onnxruntime: ModuleType) -> Provider:
    """The provider that the settings ask for, its options and threads; see `find_provider`."""
    provider = find_provider(
        config.provider, onnxruntime, config.provider_options, strict=config.strict
    )
    return provider.with_threads(config.threads or usable_cores())


def _added() -> dict[str, metadata.EntryPoint]:
    """Entry points of other distributions by name; ours cannot be replaced."""
    found = metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: entry for entry in found if entry.name not in _MODULES}


def _loaded(entry: metadata.EntryPoint) -> Provider:
    origin = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    try:
        provider = entry.load()
    except Exception as exc:
        raise ProviderError(
            f"provider {entry.name}{origin} cannot be loaded from {entry.value}: "
            f"{type(exc).__name__}: {exc}; update or remove that distribution"
        ) from exc
    if not isinstance(provider, Provider):
        raise ProviderError(
            f"provider {entry.name}{origin}: {entry.value} is a {type(provider).__name__}, not an "
            "ortolan.runtime.providers.Provider; update or remove that distribution"
        )
    return provider


def _hint(name: str) -> str:
    """The nearest name, by Ortolan's, ONNX Runtime's or other names."""
    known = {provider: provider for provider in provider_names()}
    names = {**_OTHER_NAMES, **known}
    for provider in builtin_providers():
        names[provider.ort_name.lower()] = provider.name
        names[provider.ort_name.lower().removesuffix("executionprovider")] = provider.name
    near = difflib.get_close_matches(name.lower(), names, n=1)
    if near:
        return f"did you mean {names[near[0]]}?"
    return f"known are: {', '.join(known)}"
