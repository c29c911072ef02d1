"""A bundle's decoder graphs, run with explicit KV arrays and no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from ortolan.graphs.manifest import Manifest, ModelConfig
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads

CAPACITY = 128


class GraphRunner:
    """One row of a bundle in float32 arithmetic."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: ModelConfig = Manifest.read(folder).model
        self._sessions: dict[str, ort.InferenceSession] = {}
        c = self.config
        # Not zeros: what lies beyond the row's length must never be read.
        self._kv = {
            f"past_key_values.{i}.{part}": ort.OrtValue.ortvalue_from_numpy(
                np.full((1, c.num_kv_heads, CAPACITY, c.head_dim), 1e3, np.float32)
            )
            for i in range(c.num_layers)
            for part in ("key", "value")
        }

    def logits(self, ids: list[int], past: int = 0, graph: str = "prefill") -> np.ndarray:
        """Logits [len(ids), vocab] of tokens after `past` others, whose KV is kept."""
        length = past + len(ids)
        feeds: dict[str, Any] = {
            "input_ids": np.array([ids], np.int64),
            "seqlens_k": np.array([length - 1], np.int32),
            "total_sequence_length": np.array(length, np.int32),
        }
        if graph != "decode":
            feeds["logits_index"] = np.arange(len(ids), dtype=np.int32)[None]
        if graph == "prefill_ragged":
            feeds["query_seqlens"] = np.array([len(ids)], np.int32)
        binding = self._session(graph).io_binding()
        binding.bind_output("logits")  # the first to be bound is the first that comes back
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for name, buffer in self._kv.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
        self._session(graph).run_with_iobinding(binding)
        found: np.ndarray = binding.get_outputs()[0].numpy()
        return found.reshape(len(ids), -1).copy()

    def greedy(self, first: int, past: int, count: int) -> list[int]:
        """`count` tokens from `first` on, each the likeliest after those before it."""
        ids = [first]
        for _ in range(count - 1):
            ids.append(int(self.logits(ids[-1:], past, "decode")[0].argmax()))
            past += 1
        return ids

    def _session(self, graph: str) -> ort.InferenceSession:
        if graph not in self._sessions:
            use_threads(None)
            self._sessions[graph] = ort.InferenceSession(
                self.folder / f"{graph}.onnx",
                session_options({"session.qdq_matmulnbits_accuracy_level": "1"}),
                providers=["CPUExecutionProvider"],
            )
        return self._sessions[graph]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, over the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
