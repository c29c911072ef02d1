"""DirectML, on any graphics processor with Direct3D 12; Windows only.

Its documentation: memory patterns and parallel execution are not supported, and have to be off; a
session is run by one thread at a time, which is how the engine runs every session. device_id counts
adapters as Windows lists them; 0 drives the display and is often not the fastest. Without it,
performance_preference and device_filter let Windows choose.

Sources: https://onnxruntime.ai/docs/execution-providers/DirectML-ExecutionProvider.html, and
dml_provider_factory.cc of ONNX Runtime for the names. None of it has run on such a device.
"""

from __future__ import annotations

from ortolan.runtime.providers.base import Capabilities, Provider
from ortolan.runtime.providers.options import Option

PROVIDER = Provider(
    name="directml",
    ort_name="DmlExecutionProvider",
    distribution="onnxruntime-directml",
    capabilities=Capabilities(dtypes=("float32", "float16")),
    remedy="on Windows, in an environment of its own: pip install onnxruntime-directml",
    extra="directml",
    systems=("win32",),
    hint="it needs Windows 10 1903 or later and a graphics driver for Direct3D 12",
    device="dml",
    memory_pattern=False,
    sequential=True,
    known_options={
        "device_id": Option("whole"),
        "performance_preference": Option(choices=("default", "high_performance", "minimum_power")),
        "device_filter": Option(choices=("gpu", "npu", "any")),
        "disable_metacommands": Option(choices=("true", "false")),
    },
)
