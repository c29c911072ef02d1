"""DirectML, on any graphics processor with Direct3D 12; Windows only."""

from __future__ import annotations

from ortolan.runtime.providers.base import Capabilities, Provider

PROVIDER = Provider(
    name="directml",
    ort_name="DmlExecutionProvider",
    distribution="onnxruntime-directml",
    capabilities=Capabilities(dtypes=("float32", "float16")),
    remedy="on Windows, in an environment of its own: pip install onnxruntime-directml",
    device="dml",
    # Its documentation: memory patterns and parallel execution are not supported.
    memory_pattern=False,
)
