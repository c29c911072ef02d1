"""WebGPU, on whatever Vulkan, Metal or Direct3D 12 offers.

Its options are read from the session's config, under `ep.webgpuexecutionprovider.`; given as
provider options from Python they are passed over without a word (seen with 1.27). Sessions of one
deviceId share a device.

Source: https://onnxruntime.ai/docs/execution-providers/WebGPU-ExecutionProvider.html. Left out are
the options that hold addresses (webgpuInstance, webgpuDevice, dawnProcTable).
"""

from __future__ import annotations

from ortolan.runtime.providers.base import Capabilities, Provider
from ortolan.runtime.providers.options import Option

_FLAG, _WHOLE = Option("flag"), Option("whole")
_CACHE = Option(choices=("disabled", "lazyRelease", "simple", "bucket"))

PROVIDER = Provider(
    name="webgpu",
    ort_name="WebGpuExecutionProvider",
    distribution="onnxruntime-webgpu",
    # In 1.27 its attention takes the largest length for that of every row.
    capabilities=Capabilities(ragged_decode=False, flavors=("gqa",), dtypes=("float32", "float16")),
    remedy="in an environment of its own: pip install onnxruntime-webgpu",
    extra="webgpu",
    hint="on Linux it needs libvulkan.so.1 and a Vulkan driver (Debian: libvulkan1 and "
    "mesa-vulkan-drivers); docs/providers.md has a software device",
    device="webgpu",
    option_prefix="ep.webgpuexecutionprovider.",
    known_options={
        "deviceId": _WHOLE,
        "dawnBackendType": Option(choices=("D3D12", "Vulkan")),
        "powerPreference": Option(choices=("high-performance", "low-power")),
        "preferredLayout": Option(choices=("NCHW", "NHWC")),
        "enableInt64": _FLAG,
        "forceCpuNodeNames": Option(),
        "maxStorageBufferBindingSize": Option("bytes"),
        "preserveDevice": _FLAG,
        "validationMode": Option(choices=("disabled", "wgpuOnly", "basic", "full")),
        "storageBufferCacheMode": _CACHE,
        "uniformBufferCacheMode": _CACHE,
        "queryResolveBufferCacheMode": _CACHE,
        "defaultBufferCacheMode": _CACHE,
    },
)
