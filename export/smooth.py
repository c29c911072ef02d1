"""Weights made fit for 8-bit activations: what is large in few channels is shared with the weights.

A token's activations have one scale, so a few large channels leave few steps to all others. With
x W = (x / s) (s W), a scale s for each channel moves some of that into the weights, at no cost
where x / s can be had by scaling what makes x: a norm's weights, or the rows of `up`, which `down`
reads. What is read from the attention is left as it is: to scale it, values in the KV cache would
have to be scaled, and the other phase reads them too.
Source: Xiao et al. 2022, arXiv:2211.10438. Its s = max|x|^a / max|W|^(1-a) takes largest numbers;
root mean squares with a = 1/2, which balance the rounding errors of both factors, lost a third less
on SmolLM2 (docs/presets.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ortolan.export.calibration import (
    TAPS,
    Floats,
    Ids,
    LayerRunner,
    LayerWeights,
    Tap,
)
from ortolan.export.phases import Phase, Progress
from ortolan.export.quantize import quantize
from ortolan.export.weights import Weight
from ortolan.export.write_weights import Checkpoint
from ortolan.graphs.formats import FLOAT32, W8A8, Formats, WeightFormat, layer_name, layer_norms
from ortolan.graphs.manifest import ModelConfig

# What products that would lose most are stored in, where decode has no such blocks to share.
KEPT = WeightFormat("int8", 64)
_KEPT_SHARE = 0.4  # of the layers' last products
_SAMPLED_ROWS = 1024
_STEPS = 127  # between zero and a token's largest number
_TINY = 1e-6  # of a root mean square: a channel that is always zero is not divided by zero
# A scale beyond this says that a channel is all but dead, and is not worth its float range.
_MOST = 1e4


@dataclass(frozen=True)
class Fold:
    """What a weight [N, K] is multiplied with: rows [N], columns [K]; None for nothing."""

    rows: Floats | None = None
    columns: Floats | None = None

    def apply(self, values: Floats) -> Floats:
        """Scaled values of a matrix [N, K] or, by rows alone, a vector [N]."""
        if self.rows is not None:
            values = values * (self.rows if values.ndim == 1 else self.rows[:, None])
        if self.columns is not None:
            values = values * self.columns
        return np.asarray(values, np.float32)


@dataclass(frozen=True)
class FoldedCheckpoint:
    """A checkpoint some of whose weights are scaled."""

    source: Checkpoint
    folds: Mapping[str, Fold]

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        return self.source.formats

    def read(self, name: str) -> Weight:
        weight = self.source.read(name)
        fold = self.folds.get(name)
        return weight if fold is None else Weight(FLOAT32, fold.apply(weight.dequantized()))


def has_w8a8(phase: Phase) -> bool:
    """Whether some of the phase's products are of integers."""
    return any(fmt.w8a8 for fmt in phase.formats.values())


def smoothed(
    phase: Phase,
    config: ModelConfig,
    windows: Ids,
    progress: Progress | None = None,
    beside: Formats | None = None,
) -> Phase:
    """The phase with its W8A8 weights smoothed, and those in blocks that would lose most.

    beside: the formats of the other phase, whose blocks are shared if they have 8 bits.
    windows: token ids of a calibration text [windows, chunk]. One layer's weights, and what it
    reads, are in memory at a time. Raises what `LayerRunner` raises.
    """
    runner = LayerRunner(phase.checkpoint, config, windows)
    hidden = runner.embedded()
    folds: dict[str, Fold] = {}
    losses: list[float] = []
    for layer in range(config.num_layers):
        if progress is not None:
            progress(f"smoothing layer {layer}", layer, config.num_layers)
        weights = runner.weights(layer)
        seen = _Seen(windows.size)
        hidden = runner.run(layer, weights, hidden, seen.add)
        scales = _scales(phase, config, layer, weights, seen)
        folds |= _folds(config, layer, scales, weights)
        losses.append(_loss_of_down(weights, seen, scales.get("mlp_down"), hidden))
    formats = dict(phase.formats)
    for layer in _worst(losses):
        name = layer_name(layer, "mlp.down_proj")
        if formats[name].w8a8:
            other = KEPT if beside is None else beside[name]
            formats[name] = other if other.blocked and other.bits == 8 else KEPT
            # Rounded in blocks it gains nothing by scales, so what it reads has none either.
            folds.pop(name, None)
            for up in _up(layer):
                if up in folds:
                    folds[up] = replace(folds[up], rows=None)
    made = phase.made | folds.keys()
    checkpoint = FoldedCheckpoint(phase.checkpoint, folds)
    return replace(phase, checkpoint=checkpoint, formats=formats, made=made)


class _Seen:
    """What the taps saw: mean squares of each channel over all rows, and some of the rows."""

    def __init__(self, rows: int) -> None:
        self._every = max(1, rows // _SAMPLED_ROWS)
        self._sums: dict[Tap, Floats] = {}
        self._rows = 0
        self._samples: list[Floats] = []

    def add(self, taps: Mapping[Tap, Floats]) -> None:
        for tap, x in taps.items():
            self._sums[tap] = self._sums.get(tap, np.float32(0)) + np.square(x).sum(0)
        down = taps["mlp_down"]
        # Rows are counted on from call to call, so that those taken can be found again.
        first = -self._rows % self._every
        self._samples.append(down[first :: self._every])
        self._rows += len(down)

    def root_mean_square(self, tap: Tap) -> Floats:
        return np.asarray(np.sqrt(self._sums[tap] / self._rows), np.float32)

    def down_inputs(self) -> Floats:
        """Some rows of what `down` read: every n-th of all."""
        return np.concatenate(self._samples)

    def sampled(self, hidden: Floats) -> Floats:
        """The same rows of hidden states [windows, chunk, hidden]."""
        return hidden.reshape(-1, hidden.shape[-1])[:: self._every]


def _scales(
    phase: Phase, config: ModelConfig, layer: int, weights: LayerWeights, seen: _Seen
) -> dict[Tap, Floats]:
    """What the channels of each tap are divided by, where they can be."""
    norms = layer_norms(config)
    makers = {
        "attention_in": norms.attention_in,
        "mlp_in": norms.mlp_in,
        "mlp_down": "mlp.up_proj",
    }
    scales: dict[Tap, Floats] = {}
    for tap, readers in TAPS.items():
        maker = makers.get(tap)
        if maker is None or not all(phase.formats[layer_name(layer, r)].w8a8 for r in readers):
            continue
        if tap == "mlp_down" and not phase.formats[layer_name(layer, maker)].w8a8:
            continue  # rows of blocks would be rounded again
        x = np.maximum(seen.root_mean_square(tap), _TINY)
        joined = np.concatenate([weights[reader] for reader in readers])
        w = np.maximum(np.sqrt(np.mean(np.square(joined), 0)), _TINY)
        scale = np.sqrt(x / w)
        middle = np.median(scale)
        scales[tap] = np.clip(scale, middle / _MOST, middle * _MOST)
    return scales


def _folds(
    config: ModelConfig, layer: int, scales: Mapping[Tap, Floats], weights: LayerWeights
) -> dict[str, Fold]:
    """The layer's scaled weights."""
    norms = layer_norms(config)
    folds: dict[str, Fold] = {}
    reads: tuple[tuple[Tap, str | None], ...] = (
        ("attention_in", norms.attention_in),
        ("mlp_in", norms.mlp_in),
    )
    for tap, norm in reads:
        if tap in scales and norm is not None:
            folds[layer_name(layer, norm)] = Fold(rows=np.float32(1) / scales[tap])
    for tap, scale in scales.items():
        for reader in TAPS[tap]:
            folds[layer_name(layer, reader)] = Fold(columns=scale)
    if "mlp_down" in scales:
        for name in _up(layer):
            if name.removeprefix(layer_name(layer, "")) in weights:
                before = folds.get(name, Fold())
                folds[name] = replace(before, rows=np.float32(1) / scales["mlp_down"])
    return folds


def _up(layer: int) -> tuple[str, str]:
    """The weights whose rows make what `down` reads."""
    return layer_name(layer, "mlp.up_proj"), layer_name(layer, "mlp.up_proj.bias")


def _loss_of_down(
    weights: LayerWeights, seen: _Seen, scale: Floats | None, hidden: Floats
) -> float:
    """Squared error of the MLP's last product in W8A8, relative to the hidden states after it.

    That product loses most, and its error stays in the residual.
    """
    x, w = seen.down_inputs(), weights["mlp.down_proj"]
    exact = x @ w.T
    if scale is not None:
        x, w = x / scale, w * scale
    step = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30) / _STEPS
    rounded = quantize(Weight(FLOAT32, np.ascontiguousarray(w)), W8A8)
    assert rounded.scale is not None
    error = (np.rint(x / step) * step) @ (rounded.codes * rounded.scale).T - exact
    after = np.square(seen.sampled(hidden)).sum(-1)
    return float(np.mean(np.square(error).sum(-1) / np.maximum(after, _TINY)))


def _worst(losses: Sequence[float]) -> list[int]:
    """The layers that would lose most."""
    count = math.ceil(len(losses) * _KEPT_SHARE)
    return sorted(range(len(losses)), key=lambda layer: -losses[layer])[:count]
