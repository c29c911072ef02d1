"""What this machine is, and what it reaches: read bandwidth and matrix peaks, measured."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.bench.graph import FLOAT32, IN_FLOAT32, Node
from ortolan.optional import require
from ortolan.runtime.machine import usable_cores

FloatArray = npt.NDArray[np.float32]

_PACKAGES = ("ortolan", "onnxruntime", "numpy")
# Of some hundred flags, those that decide which kernels run.
_FLAGS = (
    *("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx_vnni", "avx512_vnni"),
    *("avx512_bf16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)
_ROWS = 256  # as many as a prefill chunk
_SIDE = 2048
# Larger than the caches, and what a step of a large model reads.
_DRAM_BYTES, _QUICK_BYTES = 256 << 20, 8 << 20
_LEAST_BYTES = 4 << 20
# For each measurement in each round.
_BUDGET_S, _QUICK_BUDGET_S, _LEAST_RUNS = 0.2, 0.01, 3


def describe_machine() -> dict[str, Any]:
    """Processor, what the container may use of it, memory, and the flags that kernels look at."""
    model, flags = cpu_info()
    return {
        "cpu": model,
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "memory_bytes": memory_limit(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "system": f"{platform.system()} {platform.release()}",
    }


def describe_versions() -> dict[str, str]:
    """Python, and the packages that compute."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def load_average() -> float | None:
    """Runnable processes over the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


class OtherWork:
    """How busy other processes keep the machine, from the time this is made on."""

    def __init__(self) -> None:
        self._began = (time.monotonic(), _busy_s(), _own_s())

    def cores(self) -> float | None:
        """Cores that others used on average; None where Linux's /proc is absent.

        Processes of ours count as others until they have been waited for.
        """
        then_s, busy_then_s, own_then_s = self._began
        busy_s = _busy_s()
        if busy_s is None or busy_then_s is None:
            return None
        wall_s = max(time.monotonic() - then_s, 1e-9)
        return max(0.0, (busy_s - busy_then_s - (_own_s() - own_then_s)) / wall_s)


def _busy_s() -> float | None:
    """Seconds that all processors together have been busy."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    user, nice, system = (float(ticks) for ticks in first.split()[1:4])
    return (user + nice + system) / float(os.sysconf("SC_CLK_TCK"))


def _own_s() -> float:
    """Seconds of processor time of this process and of the children it has waited for."""
    return sum(os.times()[:4])


def memory_limit() -> int | None:
    """Bytes of memory: the cgroup's limit (version 2, then 1) or the machine's, the lesser."""
    limits = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
        except (OSError, ValueError):  # "max" is no number
            continue
    return min(limits, default=None)


def cpu_info() -> tuple[str, frozenset[str]]:
    """The processor's name, and its flags where Linux's /proc has them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    pairs = (line.partition(":") for line in lines)
    values = {key.strip(): value.strip() for key, _, value in pairs}
    flags = values.get("flags") or values.get("Features", "")
    return values.get("model name") or platform.machine(), frozenset(flags.split())


class MachinePeaks:
    """Measures bandwidth and matrix peaks with so many threads; keeps the best of all rounds.

    The thread pool of the process must have been set to as many. size: bytes that a decode step
    reads: bandwidth is measured over an array of that size, since caches help a small model, and
    over one larger than the caches.
    """

    def __init__(self, nodes: Collection[Node], size: float, threads: int, quick: bool) -> None:
        self._threads = threads
        self._budget_s = _QUICK_BUDGET_S if quick else _BUDGET_S
        large = _QUICK_BYTES if quick else _DRAM_BYTES
        self._array: FloatArray = np.ones(large // 4, np.float32)
        self._model_items = int(min(max(size, _LEAST_BYTES), large)) // 4
        self._products = _products(nodes, quick)
        self.bandwidth = 0.0  # bytes/s, an array of the model's size
        self.dram_bandwidth = 0.0
        self.flops: dict[str, float] = {}

    def measure(self) -> None:
        """One round; a second or two."""
        model, large = (
            _read_rate(array, self._threads, self._budget_s)
            for array in (self._array[: self._model_items], self._array)
        )
        self.bandwidth = max(self.bandwidth, model)
        self.dram_bandwidth = max(self.dram_bandwidth, large)
        for name, flops, run in self._products:
            self.flops[name] = max(self.flops.get(name, 0.0), flops / _best_s(run, self._budget_s))


def _best_s(run: Callable[[], object], budget_s: float) -> float:
    """The shortest of as many runs as fit into the budget, and of three at least.

    The best, since what disturbs a run makes it slower only; on a busy machine it takes many
    tries to meet two free cores.
    """
    best, runs, until_s = float("inf"), 0, time.perf_counter() + budget_s
    while runs < _LEAST_RUNS or time.perf_counter() < until_s:
        began_ns = time.perf_counter_ns()
        run()
        best = min(best, (time.perf_counter_ns() - began_ns) * 1e-9)
        runs += 1
    return best


def _read_rate(array: FloatArray, threads: int, budget_s: float) -> float:
    """Bytes per second read by as many threads, each on its own piece, in one dot product each."""
    pieces = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:

        def read() -> None:
            list(pool.map(lambda piece: np.dot(piece, piece), pieces))

        return array.nbytes / _best_s(read, budget_s)


Product = tuple[str, float, Callable[[], object]]


def _products(nodes: Collection[Node], quick: bool) -> list[Product]:
    """For each format of the graph: its largest product's shape, and a square one; and float32."""
    side, rows = (128, 32) if quick else (_SIDE, _ROWS)
    shapes: dict[str, set[tuple[int, int]]] = {FLOAT32: {(side, side)}}
    for name in sorted({node.format for node in nodes if node.format} - {FLOAT32}):
        sizes = {node.size for node in nodes if node.format == name}
        shapes[name] = {(side, side), max(sizes, key=lambda size: size[0] * size[1])}
    return [
        (name, 2.0 * rows * k * n, _product(name, rows, k, n))
        for name, sizes in shapes.items()
        for k, n in sizes
    ]


def _product(name: str, rows: int, k: int, n: int) -> Callable[[], object]:
    """A run of x [rows, K] times a random weight [K, N] of that format, by ONNX Runtime."""
    onnx = require("onnx", "bench", "measuring the matrix peak")
    ort = require("onnxruntime", "cpu", "measuring the matrix peak")
    from ortolan.runtime.engine.sessions import session_options

    helper, numpy_helper, real = onnx.helper, onnx.numpy_helper, onnx.TensorProto.FLOAT
    random = np.random.default_rng(0)
    if name == FLOAT32:
        weights: list[npt.NDArray[Any]] = [random.random((k, n), dtype=np.float32)]
        node = helper.make_node("MatMul", ["x", "w0"], ["y"])
    else:
        bits, block = _parsed(name)
        level = 1 if name.endswith(IN_FLOAT32) else 4
        blocks = -(-k // block)
        codes = random.integers(0, 256, (n, blocks, block * bits // 8), dtype=np.uint8)
        weights = [codes, random.random((n, blocks), dtype=np.float32)]
        sizes = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": level}
        node = helper.make_node(
            "MatMulNBits", ["x", "w0", "w1"], ["y"], domain="com.microsoft", **sizes
        )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", real, [rows, k])],
        [helper.make_tensor_value_info("y", real, [rows, n])],
        [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(weights)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(
        model.SerializeToString(), session_options({}), providers=["CPUExecutionProvider"]
    )
    feeds = {"x": random.random((rows, k), dtype=np.float32)}
    run: Callable[[], object] = lambda: session.run(None, feeds)  # noqa: E731  (bound to its feeds)
    run()
    return run


def _parsed(name: str) -> tuple[int, int]:
    """Bits and block size of "int4 block 32"."""
    kind, _, block = name.removesuffix(IN_FLOAT32).partition(" block ")
    return int(kind.removeprefix("int")), int(block)
