"""Scales of an int8 KV cache: from the keys and values of a calibration text, once for all.

A scale belongs to a dimension of a KV head and never changes, so that a key's codes depend on
nothing but the key. Keys are kept rotated: what turns slowly is small in one dimension at the
positions of a short text, and large at those of a long prompt. So a key's scale is its largest
value at any position of the bundle's context, which its angle at one position tells.

Of values beyond its scale a code keeps the largest that there is, so the text must show all that
a model can be asked: four of the shipped text's 21 windows, without its other scripts, cost three
times as much KL as all of them. A margin costs more than it saves (1.3: 0.0031 against 0.0019).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortolan.export.calibration import Ids, LayerRunner, LayerWeights, Tap
from ortolan.export.weights_file import WeightsFile
from ortolan.export.write_weights import Checkpoint
from ortolan.graphs.formats import layer_name
from ortolan.graphs.manifest import ModelConfig, RopeName, WeightGroup
from ortolan.graphs.rotary import config_rotary_tables

Floats = npt.NDArray[np.float32]

_MOST = 127.0  # of a code, either way
_SMALLEST = 1e-12  # a dimension that was always zero still divides


def kv_scales(checkpoint: Checkpoint, config: ModelConfig, windows: Ids) -> dict[str, Floats]:
    """The graphs' `k_scale` and `v_scale` of every layer, float32 [kv_heads, 1, head_dim].

    windows: token ids [windows, chunk], each read as a context of its own. Raises what running
    the layers does.
    """
    runner = LayerRunner(checkpoint, config, windows)
    hidden = runner.embedded()
    found: dict[str, Floats] = {}
    for layer in range(config.num_layers):
        weights = runner.weights(layer)
        largest = _Largest(config, layer, weights)
        hidden = runner.run(layer, weights, hidden, largest.see)
        for name, values in (("k_scale", largest.key), ("v_scale", largest.value)):
            full = f"{layer_name(layer, 'self_attn')}.{name}"
            scale = np.maximum(values, _SMALLEST) / _MOST
            found[full] = scale[:, None].astype(np.float32)
    return found


def write_scales(
    scales: Mapping[str, Floats], file: WeightsFile
) -> tuple[dict[str, ir.ExternalTensor], list[WeightGroup]]:
    """Write them for all graphs: references by name, and what was written, if anything."""
    sizes = [
        file.add(name, array, ir.DataType.FLOAT, as_it_is=True) for name, array in scales.items()
    ]
    elements = sum(array.size for array in scales.values())
    group = WeightGroup("kv scales", "float32", len(scales), elements, sum(sizes))
    return {name: file.tensors[name] for name in scales}, [group] if scales else []


class _Largest:
    """The largest keys and values [kv_heads, head_dim] of a layer, at any position."""

    def __init__(self, config: ModelConfig, layer: int, weights: LayerWeights) -> None:
        self._config = config
        self._weights = weights
        self._rope = config.layer_rope(layer) if config.layer_turns(layer) else None
        self.key = self.value = np.zeros((config.num_kv_heads, config.head_dim), np.float32)

    def see(self, taps: Mapping[Tap, Floats]) -> None:
        """What the layer's attention reads, [rows, hidden]."""
        x = taps["attention_in"]
        key, value = self._projected(x, "k_proj"), self._projected(x, "v_proj")
        if self._config.qk_norm:
            key = self._normed(key)
        key = np.abs(key) if self._rope is None else self._turned(key, self._rope)
        self.key = np.maximum(self.key, key.max(0))
        self.value = np.maximum(self.value, np.abs(value).max(0))

    def _projected(self, x: Floats, part: str) -> Floats:
        """[rows, kv_heads, head_dim]."""
        y = x @ self._weights[f"self_attn.{part}"].T
        if self._config.qkv_bias:
            y += self._weights[f"self_attn.{part}.bias"]
        return y.reshape(len(x), self._config.num_kv_heads, self._config.head_dim)

    def _normed(self, key: Floats) -> Floats:
        shape = key.shape
        if self._config.qk_norm_joint:
            key = key.reshape(len(key), 1, -1)
        mean_square = np.mean(np.square(key), axis=-1, keepdims=True)
        normed = key / np.sqrt(mean_square + self._config.rms_norm_eps)
        return np.asarray(normed * self._weights["self_attn.k_norm"]).reshape(shape)

    def _turned(self, key: Floats, rope: RopeName) -> Floats:
        """|key| at the position of the context where it is largest, dimension by dimension."""
        config = self._config
        # The angle and the magnitude of one step, which all rope scalings come down to.
        cos, sin = (table[1] for table in config_rotary_tables(config, rope, 2))
        angle, magnitude = np.arctan2(sin, cos), np.hypot(cos, sin)
        half = len(angle)
        first, second = key[..., :half], key[..., half : 2 * half]
        length = np.hypot(first, second) * magnitude
        start = np.arctan2(second, first)
        end = start + angle * (config.max_context - 1)
        turned = np.abs(key)  # what does not turn stays
        turned[..., :half] = length * _largest_cosine(start, end)
        quarter = np.float32(np.pi / 2)  # a sine is the cosine of a quarter turn less
        turned[..., half : 2 * half] = length * _largest_cosine(start - quarter, end - quarter)
        return turned


def _largest_cosine(start: Floats, end: Floats) -> Floats:
    """The largest |cos| of the angles from start to end."""
    peak = np.floor(end / np.pi) > np.floor(start / np.pi)  # a multiple of pi lies between
    return np.where(peak, 1.0, np.maximum(np.abs(np.cos(start)), np.abs(np.cos(end))))
