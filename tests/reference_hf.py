"""The families of Hugging Face checkpoints in numpy and float64, straight from config.json.

It shares no code with ours. Formulas are those of the papers and of transformers' definitions:
rotate-half rotary embedding with the angles of each position worked out one by one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy


class ReferenceHf:
    """Recomputes everything at every call; no cache to get wrong."""

    def __init__(self, folder: Path) -> None:
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w: dict[str, np.ndarray] = {}
        for file in folder.glob("*.safetensors"):
            loaded = safetensors.numpy.load_file(file)
            self.w |= {name: array.astype(np.float64) for name, array in loaded.items()}
        self.heads, self.kv_heads = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        self.head_dim = self.c["head_dim"]
        self.angles, self.magnitude = self._rope()

    def logits(self, ids: list[int]) -> np.ndarray:
        """[len(ids), vocab]"""
        c, table = self.c, self.w["model.embed_tokens.weight"]
        x = table[ids] * c.get("embedding_multiplier", 1.0)
        branch = c.get("residual_multiplier", 1.0)
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            x = x + branch * self._attention(i, self._norm(x, f"{at}.input_layernorm.weight"))
            y = self._norm(x, f"{at}.post_attention_layernorm.weight")
            if c["model_type"] == "phi3":
                gate, up = np.split(y @ self.w[f"{at}.mlp.gate_up_proj.weight"].T, 2, axis=-1)
            else:
                gate, up = (self._linear(y, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + branch * self._linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
        head = self.w.get("lm_head.weight", table)
        x = self._norm(x, "model.norm.weight")
        return np.asarray(x @ head.T / c.get("logits_scaling", 1.0))

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0))

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        square = np.mean(x * x, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(square + self.c["rms_norm_eps"]) * self.w[name])

    def _attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        at, n = f"model.layers.{layer}.self_attn", len(x)
        if self.c["model_type"] == "phi3":
            width = self.heads * self.head_dim
            both = x @ self.w[f"{at}.qkv_proj.weight"].T
            flat = np.split(both, [width, width + self.kv_heads * self.head_dim], axis=-1)
        else:
            flat = [self._linear(x, f"{at}.{name}_proj") for name in "qkv"]
        q, k, v = (part.reshape(n, -1, self.head_dim) for part in flat)
        if f"{at}.q_norm.weight" in self.w:
            q, k = self._norm(q, f"{at}.q_norm.weight"), self._norm(k, f"{at}.k_norm.weight")
        no_rope = self.c.get("no_rope_layers")
        if no_rope is None or no_rope[layer]:
            q, k = self._rotate(q), self._rotate(k)
        scale = self.c.get("attention_multiplier", self.head_dim**-0.5)
        window = self._window(layer)
        out = np.zeros_like(q)
        for head in range(self.heads):
            shared = head // (self.heads // self.kv_heads)
            for at_query in range(n):
                first = max(0, at_query - window + 1) if window else 0
                keys = k[first : at_query + 1, shared]
                scores = keys @ q[at_query, head] * scale
                weights = np.exp(scores - scores.max())
                out[at_query, head] = weights @ v[first : at_query + 1, shared] / weights.sum()
        return self._linear(out.reshape(n, -1), f"{at}.o_proj")

    def _window(self, layer: int) -> int:
        size = self.c.get("sliding_window") or 0
        if self.c["model_type"] in ("mistral", "phi3"):
            return size
        if not self.c.get("use_sliding_window"):
            return 0
        if "layer_types" in self.c:
            return size if self.c["layer_types"][layer] == "sliding_attention" else 0
        return size if layer >= self.c["max_window_layers"] else 0

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """x [length, heads, head_dim]; dimension j turns with dimension j + rotary_dim / 2."""
        half = len(self.angles)
        turned = x.copy()
        for position in range(len(x)):
            for j, angle in enumerate(self.angles):
                cos = math.cos(position * angle) * self.magnitude
                sin = math.sin(position * angle) * self.magnitude
                a, b = x[position, :, j], x[position, :, j + half]
                turned[position, :, j] = a * cos - b * sin
                turned[position, :, j + half] = b * cos + a * sin
        return turned

    def _rope(self) -> tuple[list[float], float]:
        """What each pair turns by from one position to the next, and the magnitude."""
        c = self.c
        rope = {**c, **(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        dim = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        plain = [rope["rope_theta"] ** (-2 * j / dim) for j in range(dim // 2)]
        known = rope.get("original_max_position_embeddings", c["max_position_embeddings"])
        factor = rope.get("factor", 1.0)
        if kind == "linear":  # positions are divided
            return [angle / factor for angle in plain], 1.0
        if kind == "llama3":
            return [self._llama3(angle, rope, known) for angle in plain], 1.0
        if kind == "yarn":
            return self._yarn(plain, rope, dim, known)
        if kind == "longrope":  # only texts within the original context are compared
            ratio = c["max_position_embeddings"] / known
            magnitude = math.sqrt(1 + math.log(ratio) / math.log(known))
            pairs = zip(plain, rope["short_factor"], strict=True)
            return [angle / own for angle, own in pairs], magnitude
        assert kind == "default"
        return plain, 1.0

    @staticmethod
    def _llama3(angle: float, rope: dict[str, Any], known: int) -> float:
        """Meta's reference code: three cases by wavelength."""
        wavelength = 2 * math.pi / angle
        if wavelength < known / rope["high_freq_factor"]:
            return angle
        if wavelength > known / rope["low_freq_factor"]:
            return angle / rope["factor"]
        smooth = (known / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        return (1 - smooth) * angle / rope["factor"] + smooth * angle

    @staticmethod
    def _yarn(
        plain: list[float], rope: dict[str, Any], dim: int, known: int
    ) -> tuple[list[float], float]:
        """Peng et al. 2023, eq. 17 to 22 in the form that Hugging Face computes."""
        factor, base = rope["factor"], rope["rope_theta"]

        def bound(turns: float) -> float:
            return dim * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(bound(rope.get("beta_fast", 32))), 0)
        high = min(math.ceil(bound(rope.get("beta_slow", 1))), dim - 1)
        angles = []
        for j, angle in enumerate(plain):
            ramp = min(max((j - low) / ((high - low) or 0.001), 0.0), 1.0)
            angles.append(angle / factor * ramp + angle * (1 - ramp))
        return angles, rope.get("attention_factor") or 0.1 * math.log(factor) + 1.0
