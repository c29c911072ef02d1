"""The registry of execution providers: one small module each, imported when asked for."""

from __future__ import annotations

import difflib
from importlib import import_module
from types import ModuleType

from ortolan.errors import ProviderError
from ortolan.runtime.providers.base import Capabilities, Provider

__all__ = ["Capabilities", "Provider", "find_provider"]

_MODULES = {
    name: f"ortolan.runtime.providers.{name}"
    for name in ("cpu", "cuda", "directml", "openvino", "webgpu")
}


def find_provider(name: str, onnxruntime: ModuleType) -> Provider:
    """The provider of that name, which this ONNX Runtime has.

    Raises ProviderError, with the nearest name or the remedy, rather than falling back to another.
    """
    if name not in _MODULES:
        near = difflib.get_close_matches(name.lower(), _MODULES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(_MODULES)}"
        raise ProviderError(f"provider {name!r} is unknown; {hint}")
    provider: Provider = import_module(_MODULES[name]).PROVIDER
    available = onnxruntime.get_available_providers()
    if provider.ort_name not in available:
        raise ProviderError(
            f"provider {name} cannot run here: this onnxruntime {onnxruntime.__version__} has no "
            f"{provider.ort_name} (it has {', '.join(available)}); {provider.remedy}"
        )
    return provider
