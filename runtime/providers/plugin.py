"""Execution providers from a plug-in library: a file that ONNX Runtime loads at run time.

`--provider /path/lib.so` takes the provider that the library brings; where it brings several,
`--provider NAME=/path/lib.so` says which, by ONNX Runtime's name for it.
Source: https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/usage.html
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ortolan.errors import ProviderError
from ortolan.runtime.providers.base import Capabilities, Provider

_SUFFIXES = (".so", ".dll", ".dylib")

# Of what nobody has declared anything: KV lies on the host, and past and present are two buffers.
_UNKNOWN = Capabilities(in_place_kv=False, slices=True)

# Libraries that this process has registered -> the names of the providers that they brought. ONNX
# Runtime loads a library once, and refuses it a second time.
_registered: dict[Path, tuple[str, ...]] = {}


def is_library(name: str) -> bool:
    """Whether a provider's name means a plug-in library."""
    return name.lower().endswith(_SUFFIXES) or "=" in name


@dataclass(frozen=True)
class PluginProvider(Provider):
    """A provider of a registered library. devices: OrtEpDevices, all of that provider."""

    devices: tuple[Any, ...] = ()

    def with_options(self, options: Mapping[str, Any]) -> Provider:
        """The same with a user's options; those of an unknown library go to it as they are."""
        if self.known_options:
            return super().with_options(options)
        given = {name: str(value) for name, value in options.items()}
        return replace(self, options={**self.options, **given})

    def _session(self, ort: ModuleType, model: bytes | str, options: Any, own: Any) -> Any:
        options.add_provider_for_devices(list(self.devices), own)
        return ort.InferenceSession(model, options, enable_fallback=0)


def plugin_provider(name: str, ort: ModuleType, known: Collection[Provider]) -> PluginProvider:
    """The provider of the library that the name gives a path to.

    known: providers whose capabilities hold for a library that brings the same one.
    Raises ProviderError if the library or a device is missing.
    """
    wanted, equals, text = name.rpartition("=")
    path = Path(text).expanduser()
    if equals and not wanted:
        raise ProviderError(f"provider {name!r} has no name before =; give NAME=/path/to/library")
    if not path.is_file():
        raise ProviderError(f"provider {name!r}: there is no library {path}; give its whole path")
    if not hasattr(ort, "register_execution_provider_library"):
        raise ProviderError(
            f"provider {name!r}: onnxruntime {ort.__version__} loads no libraries; install 1.23 or "
            "later"
        )
    brought = _register(path.resolve(), ort, name)
    devices = [device for device in ort.get_ep_devices() if device.ep_name in brought]
    names = sorted({device.ep_name for device in devices})
    if wanted:
        devices = [device for device in devices if device.ep_name == wanted]
    elif len(names) > 1:
        raise ProviderError(f"{path} brings {', '.join(names)}; give one, as {names[0]}={path}")
    if not devices:
        found = f"; it has some for {', '.join(names)}" if names else ""
        raise ProviderError(
            f"provider {name!r}: the library lists no device{' for ' + wanted if wanted else ''} "
            f"on this machine{found}; is its hardware there, and its driver installed?"
        )
    return _made(devices, path, known)


def _register(path: Path, ort: ModuleType, name: str) -> tuple[str, ...]:
    if path not in _registered:
        before = {device.ep_name for device in ort.get_ep_devices()}
        try:
            # The name of the registration is ours to choose, and has to be there once only.
            ort.register_execution_provider_library(f"ortolan:{path}", os.fspath(path))
        except Exception as exc:
            raise ProviderError(
                f"provider {name!r}: onnxruntime {ort.__version__} cannot load {path}: {exc}"
            ) from exc
        after = {device.ep_name for device in ort.get_ep_devices()}
        _registered[path] = tuple(after - before)
    return _registered[path]


def _made(devices: list[Any], path: Path, known: Collection[Provider]) -> PluginProvider:
    ort_name: str = devices[0].ep_name
    # One device, the first of its kind: given several, the library would choose.
    chosen = (devices[0],)
    for provider in known:
        if provider.ort_name == ort_name:
            same: dict[str, Any] = {
                item.name: getattr(provider, item.name) for item in fields(Provider)
            }
            # A library is given its options under their short names, and brings what it needs.
            same |= {"options": {}, "option_prefix": "", "prepare": None}
            return PluginProvider(**same, devices=chosen)
    return PluginProvider(
        name=ort_name,
        ort_name=ort_name,
        capabilities=_UNKNOWN,
        distribution=path.name,
        remedy=f"look at {path}",
        devices=chosen,
    )
