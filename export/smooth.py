"""Weights made fit for 8-bit activations: what is large in few channels is shared with the weights.

A token's activations have one scale, so a few large channels leave few steps to all others. With
x W = (x / s) (s W), a scale s for each channel moves some of that into the weights, at no cost
where a norm makes x: its weights are scaled. What is read from the attention is left as it is: to
scale it, values in the KV cache would have to be scaled, and the other phase reads them too. What
`down` reads could be had by scaling `up`, and would still lose most of all: it stays in blocks.
Source: Xiao et al. 2022, arXiv:2211.10438. Its s = max|x|^a / max|W|^(1-a) takes largest numbers;
root mean squares with a = 1/2, which balance the rounding errors of both factors, lost a third less
on SmolLM2 (docs/presets.md).
"""

from __future__ import annotations

from collections.abc import Mapping
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
from ortolan.export.weights import Weight
from ortolan.export.write_weights import Checkpoint
from ortolan.graphs.formats import FLOAT32, WeightFormat, layer_name, layer_norms
from ortolan.graphs.manifest import ModelConfig

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
    phase: Phase, config: ModelConfig, windows: Ids, progress: Progress | None = None
) -> Phase:
    """The phase with its W8A8 weights smoothed.

    windows: token ids of a calibration text [windows, chunk]. One layer's weights, and what it
    reads, are in memory at a time. Raises what `LayerRunner` raises.
    """
    runner = LayerRunner(phase.checkpoint, config, windows)
    hidden = runner.embedded()
    folds: dict[str, Fold] = {}
    for layer in range(config.num_layers):
        if progress is not None:
            progress(f"smoothing layer {layer}", layer, config.num_layers)
        weights = runner.weights(layer)
        seen = _Seen()
        hidden = runner.run(layer, weights, hidden, seen.add)
        scales = _scales(phase, config, layer, weights, seen)
        folds |= _folds(config, layer, scales)
    made = phase.made | folds.keys()
    return replace(phase, checkpoint=FoldedCheckpoint(phase.checkpoint, folds), made=made)


class _Seen:
    """Mean squares of each channel that the taps saw, over all rows."""

    def __init__(self) -> None:
        self._sums: dict[Tap, Floats] = {}
        self._rows = 0

    def add(self, taps: Mapping[Tap, Floats]) -> None:
        for tap, x in taps.items():
            self._sums[tap] = self._sums.get(tap, np.float32(0)) + np.square(x).sum(0)
        self._rows += len(taps["mlp_in"])

    def root_mean_square(self, tap: Tap) -> Floats:
        return np.asarray(np.sqrt(self._sums[tap] / self._rows), np.float32)


def _scales(
    phase: Phase, config: ModelConfig, layer: int, weights: LayerWeights, seen: _Seen
) -> dict[Tap, Floats]:
    """What the channels of each tap are divided by, where they can be."""
    norms = layer_norms(config)
    makers: dict[Tap, str | None] = {
        "attention_in": norms.attention_in,
        "mlp_in": norms.mlp_in,
    }
    scales: dict[Tap, Floats] = {}
    for tap, maker in makers.items():
        readers = TAPS[tap]
        if maker is None or not all(phase.formats[layer_name(layer, r)].w8a8 for r in readers):
            continue
        x = np.maximum(seen.root_mean_square(tap), _TINY)
        joined = np.concatenate([weights[reader] for reader in readers])
        w = np.maximum(np.sqrt(np.mean(np.square(joined), 0)), _TINY)
        scale = np.sqrt(x / w)
        middle = np.median(scale)
        scales[tap] = np.clip(scale, middle / _MOST, middle * _MOST)
    return scales


def _folds(config: ModelConfig, layer: int, scales: Mapping[Tap, Floats]) -> dict[str, Fold]:
    """The layer's scaled weights."""
    norms = layer_norms(config)
    folds: dict[str, Fold] = {}
    for tap, norm in (("attention_in", norms.attention_in), ("mlp_in", norms.mlp_in)):
        if tap in scales and norm is not None:
            folds[layer_name(layer, norm)] = Fold(rows=1 / scales[tap])
            folds |= {layer_name(layer, r): Fold(columns=scales[tap]) for r in TAPS[tap]}
    return folds
