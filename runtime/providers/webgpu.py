"""WebGPU, on whatever Vulkan, Metal or Direct3D 12 offers."""

from __future__ import annotations

from ortolan.runtime.providers.base import Capabilities, Provider

PROVIDER = Provider(
    name="webgpu",
    ort_name="WebGpuExecutionProvider",
    distribution="onnxruntime-webgpu",
    # In 1.27 its attention takes the largest length for that of every row.
    capabilities=Capabilities(ragged_decode=False, flavors=("gqa",), dtypes=("float32", "float16")),
    remedy="in an environment of its own: pip install onnxruntime-webgpu",
    device="webgpu",
)
