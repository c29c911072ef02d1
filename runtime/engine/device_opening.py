"""Which form a device's memory takes, by what its provider can do and what it gets right."""

from __future__ import annotations

from typing import Any

from ortolan.errors import ProviderError
from ortolan.graphs.manifest import Manifest
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_kv import ApartKvCache, BatchKvCache, KvForm
from ortolan.runtime.engine.device_model import ApartDeviceModel, BatchDeviceModel, DeviceModel
from ortolan.runtime.engine.device_slices import SlicedDeviceModel, SlicedKvCache
from ortolan.runtime.engine.self_test import decodes_ragged_rows, limit_prefill
from ortolan.runtime.engine.sessions import SessionSet
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider


def check_fit(provider: Provider, manifest: Manifest, config: EngineConfig) -> None:
    """Raises ProviderError if the provider cannot run such a bundle, or not as it is set up."""
    capabilities = provider.capabilities
    if manifest.attention not in capabilities.flavors:
        raise ProviderError(
            f"provider {provider.name} does not run attention of the {manifest.attention} flavor; "
            f"export with --attention {capabilities.flavors[0]}, or use provider cpu"
        )
    dtypes = manifest.dtypes
    if dtypes.activations not in capabilities.dtypes:
        other = "cuda" if dtypes.activations == "bfloat16" else "cpu or cuda"
        raise ProviderError(
            f"provider {provider.name} has no kernels for {dtypes.activations}, which this bundle "
            f"computes in; export with --dtype {capabilities.dtypes[-1]}, or use provider {other}"
        )
    if dtypes.kv == "int8" and not capabilities.int8_kv:
        raise ProviderError(
            f"provider {provider.name} cannot read the int8 KV cache of this bundle; "
            "export without --kv int8, or use provider cpu"
        )
    if not capabilities.in_place_kv and not config.kv_copies:
        raise ProviderError(
            f"provider {provider.name} cannot write the KV cache in place: every step would copy "
            "all of it, and memory holds it twice; use another provider, or allow it with "
            "--kv-copies"
        )


def open_device_model(
    manifest: Manifest, sessions: SessionSet, config: EngineConfig, context: int, device: Device
) -> DeviceModel[Any]:
    """The decoder over a KV cache in the provider's memory, checked."""
    model, capabilities = manifest.model, device.provider.capabilities
    form = KvForm(model, context, manifest.dtypes.kv, capabilities.in_place_kv)
    slots = config.max_slots
    if capabilities.ragged_decode:
        opened: DeviceModel[Any]
        if capabilities.slices and form.in_place:
            sliced = SlicedKvCache(device, form, slots)
            opened = SlicedDeviceModel(model, sessions, device, sliced)
        else:
            opened = BatchDeviceModel(model, sessions, device, BatchKvCache(device, form, slots))
        limit_prefill(opened)
        if decodes_ragged_rows(opened):
            return opened
        del opened  # before its memory is asked for again
    apart = ApartDeviceModel(model, sessions, device, ApartKvCache(device, form, slots))
    limit_prefill(apart)
    return apart
