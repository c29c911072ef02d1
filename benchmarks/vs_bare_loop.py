"""Ortolan's decode against a bare loop over ONNX Runtime, on the same packed graphs.

The bare loop is the least that makes tokens: one IOBinding over preallocated numpy arrays, and
numpy's argmax. Ours is LLM.stream: scheduling, sampling, detokenizing, events. Both run in one
process on one thread pool, in alternating blocks of tokens at the same context lengths.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from _common import Report, Series, alternated, parser
from numpy.typing import NDArray

import ortolan
from ortolan.runtime.engine.packed import optimized_graphs

BOUND = 0.95
PROMPT = "The history of the lighthouse goes back to the fires that were lit on hills"


class BareLoop:
    """Prefill and greedy decode of one row by plain onnxruntime and numpy."""

    def __init__(self, graphs: dict[str, Path], model: ortolan.ModelConfig) -> None:
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._sessions = {
            name: ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for name, path in graphs.items()
        }
        self._vocab_size = model.vocab_size
        shape = (1, model.num_kv_heads, model.max_context, model.head_dim)
        names = [
            f"{layer}.{part}" for layer in range(model.num_layers) for part in ("key", "value")
        ]
        self._kv = {name: np.zeros(shape, np.float32) for name in names}
        self._kept: list[Any] = []
        self._ids: NDArray[np.int64] = np.zeros((1, 1), np.int64)
        self._seqlens: NDArray[np.int32] = np.zeros(1, np.int32)
        self._total: NDArray[np.int32] = np.zeros((), np.int32)
        self._length = 0
        inputs = {"input_ids": self._ids}
        self._decode, self._logits = self._bind("decode", inputs)

    def prefill(self, ids: list[int]) -> int:
        """Read the prompt; the first token of the answer."""
        name = next(name for name in self._sessions if name != "decode")
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.array([ids], np.int64),
            "logits_index": np.array([[len(ids) - 1]], np.int32),
        }
        if name == "prefill_ragged":
            inputs["query_seqlens"] = np.array([len(ids)], np.int32)
        binding, logits = self._bind(name, inputs)
        self._seqlens[:], self._total[...] = len(ids) - 1, len(ids)
        self._sessions[name].run_with_iobinding(binding)
        self._length = len(ids)
        self._ids[0, 0] = logits.argmax()
        return int(self._ids[0, 0])

    def step(self) -> int:
        """One more token."""
        self._seqlens[0] = self._length
        self._length += 1
        self._total[...] = self._length
        self._sessions["decode"].run_with_iobinding(self._decode)
        self._ids[0, 0] = token_id = self._logits.argmax()
        return int(token_id)

    def _bind(
        self, name: str, inputs: dict[str, NDArray[Any]]
    ) -> tuple[ort.IOBinding, NDArray[np.float32]]:
        binding = self._sessions[name].io_binding()
        logits: NDArray[np.float32] = np.zeros((1, 1, self._vocab_size), np.float32)
        own = {"seqlens_k": self._seqlens, "total_sequence_length": self._total}
        for input_name, array in {**inputs, **own}.items():
            binding.bind_ortvalue_input(input_name, self._value(array))
        for kv_name, array in self._kv.items():
            value = self._value(array)
            binding.bind_ortvalue_input(f"past_key_values.{kv_name}", value)
            binding.bind_ortvalue_output(f"present.{kv_name}", value)
        binding.bind_ortvalue_output("logits", self._value(logits))
        return binding, logits

    def _value(self, array: NDArray[Any]) -> ort.OrtValue:
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._kept.append((array, value))
        return value


def main() -> int:
    """Alternate blocks of tokens and report seconds per token."""
    args_parser = parser(__doc__, rounds=60)
    args_parser.add_argument("--block", type=int, default=16, help="tokens; default: %(default)s")
    args = args_parser.parse_args()
    report = Report("against a bare loop over ONNX Runtime, decode of one row")
    config = ortolan.EngineConfig(threads=args.threads)
    llm = ortolan.load(args.bundle, threads=args.threads)
    bare = BareLoop(optimized_graphs(args.bundle, config), llm.manifest.model)
    ids = llm.encode(PROMPT)
    total = args.rounds * args.block + 1
    if len(ids) + total > llm.manifest.model.max_context:
        args_parser.error("--rounds times --block does not fit into the model's context")
    full = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 1}

    def streamed(**settings: Any) -> Callable[[], int]:
        # An engine of its own: a step of one engine advances all of its streams.
        llm = ortolan.load(args.bundle, threads=args.threads)
        params = ortolan.SamplingParams(max_tokens=total, ignore_eos=True, **settings)
        events = llm.stream(ids, params)
        next(events)
        return lambda: next(events).token_id or 0

    sides: dict[str, Callable[[], int]] = {
        "ortolan greedy": streamed(temperature=0),
        "ortolan full sampling": streamed(**full),
    }
    bare.prefill(ids)
    sides["bare loop"] = bare.step
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    for turn in range(args.rounds):
        for name in alternated(list(sides), turn):
            step, made = sides[name], tokens[name]
            began_s = time.perf_counter()
            for _ in range(args.block):
                made.append(step())
            seconds[name].append((time.perf_counter() - began_s) / args.block)
    series = {
        name: Series(name, "ms/token", [s * 1e3 for s in values])
        for name, values in seconds.items()
    }
    report.speed("greedy", series["ortolan greedy"], series["bare loop"], BOUND)
    report.speed("full sampling", series["ortolan full sampling"], series["bare loop"])
    same = tokens["ortolan greedy"] == tokens["bare loop"]
    report.notes.append(f"greedy tokens are {'the same' if same else 'NOT the same'} on both sides")
    report.notes.append("full sampling: " + ", ".join(f"{k} {v}" for k, v in full.items()))
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
