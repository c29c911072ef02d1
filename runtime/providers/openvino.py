"""OpenVINO, on Intel's processors and others; its buffers lie in host memory.

A device_type that is not there, such as GPU, would have ONNX Runtime go on with its own CPU
provider, with no more than a line in its log: Provider.open_session refuses that.

Sources: https://onnxruntime.ai/docs/execution-providers/OpenVINO-ExecutionProvider.html, and the
names that the wheel of 1.24.1 accepts (it refuses others). Left out: `context`, an address, and
device_id, which it calls deprecated.
"""

from __future__ import annotations

from ortolan.runtime.providers.base import Capabilities, Provider
from ortolan.runtime.providers.options import Option

_BOOL = Option(choices=("True", "False"))
_DEVICE = r"(CPU|GPU|NPU)(\.[0-9]+)?"

PROVIDER = Provider(
    name="openvino",
    ort_name="OpenVINOExecutionProvider",
    distribution="onnxruntime-openvino",
    capabilities=Capabilities(slices=True, flavors=("gqa",)),
    remedy="in an environment of its own: pip install onnxruntime-openvino",
    extra="openvino",
    hint="device_type CPU runs anywhere; GPU and NPU need Intel's hardware and driver",
    options={"device_type": "CPU"},
    known_options={
        "device_type": Option(
            pattern=rf"{_DEVICE}|AUTO|(AUTO|HETERO|MULTI):{_DEVICE}(,{_DEVICE})*",
            says="CPU, GPU, NPU, GPU.1, AUTO or a list such as AUTO:GPU,CPU",
        ),
        "precision": Option(choices=("FP32", "FP16", "ACCURACY")),
        "num_of_threads": Option("whole"),
        "num_streams": Option("whole"),
        "cache_dir": Option(),
        "load_config": Option(),
        "model_priority": Option(choices=("LOW", "MEDIUM", "HIGH", "DEFAULT")),
        "enable_opencl_throttling": _BOOL,
        "enable_qdq_optimizer": _BOOL,
        "enable_causallm": _BOOL,
        "disable_dynamic_shapes": _BOOL,
        "reshape_input": Option(),
        "layout": Option(),
    },
)
