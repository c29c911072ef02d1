"""The CPU provider: always there with any ONNX Runtime."""

from __future__ import annotations

from ortolan.runtime.providers.base import Capabilities, Provider

PROVIDER = Provider(
    name="cpu",
    ort_name="CPUExecutionProvider",
    distribution="onnxruntime",
    capabilities=Capabilities(
        ragged_prefill=True,
        packs_weights=True,
        slices=True,
        int8_kv=True,
        dtypes=("float32", "float16"),
    ),
    remedy="run in Ortolan's clone: pip install '.[cpu]'",
    extra="cpu",
)
