"""What ONNX Runtime's matrix products reach here, by format and number of rows.

No bound: it explains how far prefill can be ahead of float32 on a processor. K and N are those of
SmolLM2's gate and up projections; formats alternate, and the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

K, N, BLOCK = 576, 3072, 32
FORMATS = {"float32": 32, "int8": 8, "int4": 4}


def session(bits: int) -> ort.InferenceSession:
    """One product [rows, K] x [K, N]; integers with int8 activations (accuracy level 4)."""
    random = np.random.default_rng(0)
    if bits == 32:
        weights = [random.standard_normal((K, N), dtype=np.float32)]
        node = helper.make_node("MatMul", ["x", "w0"], ["y"])
    else:
        codes = random.integers(0, 256, (N, K // BLOCK, BLOCK * bits // 8), dtype=np.uint8)
        weights = [codes, random.random((N, K // BLOCK), dtype=np.float32)]
        sizes = {"K": K, "N": N, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        node = helper.make_node(
            "MatMulNBits", ["x", "w0", "w1"], ["y"], domain="com.microsoft", **sizes
        )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", N])],
        [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(weights)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.use_per_session_threads = False  # pools of their own would spin against each other
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def main() -> int:
    """Print a row per number of rows, a column per format."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=15)
    args = arguments.parse_args()
    ort.set_global_thread_pool_sizes(args.threads, 1)
    sessions = {name: session(bits) for name, bits in FORMATS.items()}
    print(f"GFLOP/s, K={K}, N={N}, blocks of {BLOCK}, onnxruntime {ort.__version__}")
    print("rows  " + "  ".join(f"{name:>8}" for name in sessions))
    for rows in (1, 16, 128, 400):
        x = np.random.default_rng(1).standard_normal((rows, K), dtype=np.float32)
        best_s = dict.fromkeys(sessions, float("inf"))
        for _ in range(args.rounds):
            for name, each in sessions.items():
                start = time.perf_counter()
                each.run(None, {"x": x})
                best_s[name] = min(best_s[name], time.perf_counter() - start)
        flops = 2 * rows * K * N
        print(f"{rows:4}  " + "  ".join(f"{flops / s / 1e9:8.0f}" for s in best_s.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
