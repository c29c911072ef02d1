"""CUDA, on NVIDIA's graphics processors."""

from __future__ import annotations

from ortolan.runtime.providers.base import Capabilities, Provider

PROVIDER = Provider(
    name="cuda",
    ort_name="CUDAExecutionProvider",
    distribution="onnxruntime-gpu",
    capabilities=Capabilities(int8_kv=True, dtypes=("float32", "float16", "bfloat16")),
    remedy="in an environment of its own: pip install onnxruntime-gpu",
    device="cuda",
)
