"""OpenVINO, on Intel's processors and others; its buffers lie in host memory.

A device_type that is not there, such as GPU, would have ONNX Runtime go on with its own CPU
provider, with no more than a line in its log: Provider.open_session refuses that.

What it does not take of our graphs (GroupQueryAttention, GatherBlockQuantized) runs on ONNX
Runtime's own CPU provider, in place, between a piece of OpenVINO's for each layer: so --strict
refuses it. Seen with SmolLM2 on 1.24.1: shapes are dynamic, and a new one costs no more than an old
one; cache_dir makes no load quicker, and takes 650 MB, so it is not set; accuracy levels change
nothing, since products are computed from float activations either way. Its threads are its own.

Sources: https://onnxruntime.ai/docs/execution-providers/OpenVINO-ExecutionProvider.html, and the
names that the wheel of 1.24.1 accepts (it refuses others). Left out: `context`, an address;
device_id, which it calls deprecated; reshape_input and layout, for graphs of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortolan.runtime.providers.base import Capabilities, Provider
from ortolan.runtime.providers.options import Option

_BOOL = Option(choices=("True", "False"))
_DEVICE = r"(CPU|GPU|NPU)(\.[0-9]+)?"


def _list_devices() -> Sequence[str]:
    """OpenVINO's names of the devices that device_type may be set to."""
    try:
        from onnxruntime.capi._pybind_state import get_available_openvino_device_ids
    except ImportError:  # another build
        return ()
    found: Sequence[str] = get_available_openvino_device_ids()
    return found


PROVIDER = Provider(
    name="openvino",
    ort_name="OpenVINOExecutionProvider",
    distribution="onnxruntime-openvino",
    capabilities=Capabilities(slices=True, flavors=("gqa",)),
    remedy="in an environment of its own: pip install onnxruntime-openvino",
    extra="openvino",
    hint="device_type CPU runs anywhere; GPU and NPU need Intel's hardware and driver",
    list_devices=_list_devices,
    options={"device_type": "CPU"},
    threads_option="num_of_threads",
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
    },
)
