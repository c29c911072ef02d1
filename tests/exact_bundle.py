"""A bundle's graphs run as they are, in float32 arithmetic, without our runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from ortolan.graphs.manifest import Manifest
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads


class ExactBundle:
    """Logits of one text: `prefill` for a prompt, then `decode` token by token."""

    def __init__(self, folder: Path, capacity: int = 128) -> None:
        self.folder = folder
        config = Manifest.read(folder).model
        shape = (1, config.num_kv_heads, capacity, config.head_dim)
        self._kv = {
            f"past_key_values.{i}.{part}": np.full(shape, 1e3, np.float32)
            for i in range(config.num_layers)
            for part in ("key", "value")
        }
        self._length = 0
        self._sessions: dict[str, ort.InferenceSession] = {}

    def prefill(self, ids: list[int]) -> np.ndarray:
        """Logits of every position, [len(ids), vocab]."""
        index = np.arange(len(ids), dtype=np.int32)[None]
        return self._run("prefill", ids, logits_index=index)[0]

    def decode(self, token: int) -> np.ndarray:
        """Logits after one more token, [1, vocab]."""
        return self._run("decode", [token])[0]

    def greedy(self, first: int, steps: int) -> list[int]:
        """`first`, and what follows it by the largest logit."""
        ids = [first]
        while len(ids) < steps:
            ids.append(int(self.decode(ids[-1]).argmax()))
        return ids

    def _run(self, graph: str, ids: list[int], **feeds: np.ndarray) -> np.ndarray:
        self._length += len(ids)
        values: dict[str, Any] = {
            "input_ids": np.array([ids], np.int64),
            "seqlens_k": np.array([self._length - 1], np.int32),
            "total_sequence_length": np.array(self._length, np.int32),
        }
        session = self._session(graph)
        outputs = session.run(None, {**values, **feeds, **self._kv})
        for output, value in zip(session.get_outputs()[1:], outputs[1:], strict=True):
            self._kv[output.name.replace("present", "past_key_values")] = value
        return np.asarray(outputs[0])

    def _session(self, graph: str) -> ort.InferenceSession:
        if graph not in self._sessions:
            use_threads(None)
            # A tied head carries its accuracy level in the graph, as an attribute.
            data = (self.folder / f"{graph}.onnx").read_bytes()
            path = self.folder / f"{graph}.exact.onnx"
            path.write_bytes(data.replace(b"accuracy_level\x18\x04", b"accuracy_level\x18\x01"))
            options = session_options({"session.qdq_matmulnbits_accuracy_level": "1"})
            self._sessions[graph] = ort.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        return self._sessions[graph]
