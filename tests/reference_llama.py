"""A Llama in numpy and float64, read from a GGUF file in GGUF's own conventions.

It shares no code with ours: weights come from `gguf.dequantize`, q and k rows stay as the file has
them, and the rotary embedding turns neighbouring pairs (llama.cpp's "normal" rope).
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


class ReferenceLlama:
    """Recomputes everything at every call; no cache to get wrong."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.settings = {key: field.contents() for key, field in reader.fields.items()}
        self.weights = {
            tensor.name.removesuffix(".weight"): gguf.quants.dequantize(
                tensor.data, tensor.tensor_type
            ).astype(np.float64)
            for tensor in reader.tensors
        }

    def _setting(self, name: str) -> float:
        return float(self.settings[f"llama.{name}"])

    def logits(self, ids: list[int]) -> np.ndarray:
        """[len(ids), vocab]"""
        x = self.weights["token_embd"][ids]
        for i in range(int(self._setting("block_count"))):
            x = x + self._attention(i, self._norm(x, f"blk.{i}.attn_norm"))
            normed = self._norm(x, f"blk.{i}.ffn_norm")
            gate = normed @ self.weights[f"blk.{i}.ffn_gate"].T
            up = normed @ self.weights[f"blk.{i}.ffn_up"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"blk.{i}.ffn_down"].T
        head = self.weights.get("output", self.weights["token_embd"])
        return np.asarray(self._norm(x, "output_norm") @ head.T)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        epsilon = self._setting("attention.layer_norm_rms_epsilon")
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + epsilon) * self.weights[name])

    def _attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        heads = int(self._setting("attention.head_count"))
        kv_heads = int(self._setting("attention.head_count_kv"))
        length = len(x)

        def split(name: str, count: int) -> np.ndarray:  # [count, length, head_dim]
            y = x @ self.weights[f"blk.{layer}.{name}"].T
            return np.asarray(y.reshape(length, count, -1).transpose(1, 0, 2))

        q = self._rotate(split("attn_q", heads))
        k = self._rotate(split("attn_k", kv_heads)).repeat(heads // kv_heads, axis=0)
        v = split("attn_v", kv_heads).repeat(heads // kv_heads, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        joined = (weights @ v).transpose(1, 0, 2).reshape(length, -1)
        return np.asarray(joined @ self.weights[f"blk.{layer}.attn_output"].T)

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """Pair (2j, 2j + 1) of x [heads, length, head_dim] by position * theta^(-2j / head_dim)."""
        length, head_dim = x.shape[1:]
        turned = np.empty_like(x)
        for j in range(head_dim // 2):
            angle = np.arange(length) * self._setting("rope.freq_base") ** (-2 * j / head_dim)
            even, odd = x[..., 2 * j], x[..., 2 * j + 1]
            turned[..., 2 * j] = even * np.cos(angle) - odd * np.sin(angle)
            turned[..., 2 * j + 1] = even * np.sin(angle) + odd * np.cos(angle)
        return turned
