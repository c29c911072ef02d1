"""CUDA, on NVIDIA's graphics processors.

What differs from ONNX Runtime's own defaults, and why:

- arena_extend_strategy kSameAsRequested: the arena's next piece is as large as what is asked for,
  not the next power of two. A server's KV cache and logits are allocated once; doubling could take
  as much again, which then lies idle, or is not there.
- use_tf32 0: products of float32 bundles keep float32's digits, which the golden comparison and
  the same bits for the same request rest on. Set it to 1 for speed with 10 bits of mantissa.
- cudnn_conv_algo_search HEURISTIC: the graphs have no convolution; whatever asks cuDNN for one
  shall not start its exhaustive benchmark while requests wait.
- do_copy_in_default_stream 1 is ONNX Runtime's default and stays: with 0 it warns of data races.

enable_cuda_graph 1 records decode per number of rows. ONNX Runtime refuses it where a compute node
is not on CUDA, and every call of one recording must use the same buffers (see Provider.captures);
prefill, whose shapes change, is opened without it.

The options that hold addresses (user_compute_stream, gpu_external_alloc ...) are left out: nobody
can know them outside of the process.

Sources: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html, and the names
that cuda_execution_provider_info.cc of ONNX Runtime parses; all are in the library of 1.31.1. None
of it has run on such a device.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
from types import ModuleType

from ortolan.runtime.providers.base import Capabilities, Provider
from ortolan.runtime.providers.options import Option

_FLAG, _WHOLE = Option("flag"), Option("whole")


def _preload(ort: ModuleType) -> None:
    """Load CUDA's and cuDNN's libraries where pip has put them (onnxruntime-gpu 1.21 and later).

    The system's loader does not look there. It prints what it does not find, where an answer may
    be printed; the session says it again, in the log.
    """
    if hasattr(ort, "preload_dlls"):
        with contextlib.suppress(OSError), contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()


def _list_devices() -> list[str]:
    """What NVIDIA's own tool says, one line for each device."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    query = ["--query-gpu=index,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run([tool, *query], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


PROVIDER = Provider(
    name="cuda",
    ort_name="CUDAExecutionProvider",
    distribution="onnxruntime-gpu",
    capabilities=Capabilities(
        slices=True,
        int8_kv=True,
        dtypes=("float32", "float16", "bfloat16"),
        graphs_captured=True,
    ),
    remedy="in an environment of its own: pip install 'onnxruntime-gpu[cuda,cudnn]'",
    extra="cuda",
    hint="it needs NVIDIA's driver, and the libraries of CUDA and cuDNN: "
    "pip install 'onnxruntime-gpu[cuda,cudnn]'",
    device="cuda",
    options={
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    },
    known_options={
        "device_id": _WHOLE,
        "gpu_mem_limit": Option("bytes"),
        "arena_extend_strategy": Option(choices=("kNextPowerOfTwo", "kSameAsRequested")),
        "cudnn_conv_algo_search": Option(choices=("EXHAUSTIVE", "HEURISTIC", "DEFAULT")),
        "cudnn_conv_use_max_workspace": _FLAG,
        "cudnn_conv1d_pad_to_nc1d": _FLAG,
        "do_copy_in_default_stream": _FLAG,
        "enable_cuda_graph": _FLAG,
        "enable_skip_layer_norm_strict_mode": _FLAG,
        "fuse_conv_bias": _FLAG,
        "prefer_nhwc": _FLAG,
        "sdpa_kernel": _WHOLE,
        "tunable_op_enable": _FLAG,
        "tunable_op_max_tuning_duration_ms": _WHOLE,
        "tunable_op_tuning_enable": _FLAG,
        "use_ep_level_unified_stream": _FLAG,
        "use_tf32": _FLAG,
    },
    capture_option="enable_cuda_graph",
    list_devices=_list_devices,
    prepare=_preload,
)
