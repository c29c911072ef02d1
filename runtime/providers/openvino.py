"""OpenVINO, on Intel's processors and others; its buffers lie in host memory."""

from __future__ import annotations

from ortolan.runtime.providers.base import Capabilities, Provider

PROVIDER = Provider(
    name="openvino",
    ort_name="OpenVINOExecutionProvider",
    distribution="onnxruntime-openvino",
    capabilities=Capabilities(slices=True, flavors=("gqa",)),
    remedy="in an environment of its own: pip install onnxruntime-openvino",
    options={"device_type": "CPU"},
)
