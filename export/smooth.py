"""Weights made fit for 8-bit activations: what is large in few channels is shared with the weights.

Where a few channels are large, few steps are left to the others that share a scale with them, in
a token or a block. With x W = (x / s) (s W), a scale s for each channel moves some of that into the
weights, at no cost where x is made by a norm, whose weights are scaled, or by the rows of `up`.
What is read from the attention is left as it is: to scale it, values in the KV cache would have to
be scaled, and the other phase reads them too.
Source: Xiao et al. 2022, arXiv:2211.10438. Its s = max|x|^a / max|W|^(1-a) takes largest numbers;
root mean squares with a = 1/2, which balance the rounding errors of both factors, lost a third less
on SmolLM2 (docs/presets.md).

The head reads what the final norm gives, and is smoothed too. Where its table is the embedding as
well, rows that are looked up are divided by the scale again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from ortolan.export.weights_file import SLAB_BYTES
from ortolan.export.write_weights import Checkpoint
from ortolan.graphs.formats import (
    EMBEDDING,
    EMBEDDING_SCALE,
    FINAL_NORM,
    FLOAT32,
    LAYERS,
    LM_HEAD,
    WeightFormat,
    layer_name,
    layer_norms,
)
from ortolan.graphs.manifest import ModelConfig

# By tap, a factor for each channel [K].
Scales = Mapping[Tap, Floats]


@dataclass(frozen=True)
class ChannelScales:
    """What channels would best be divided by: `layers` by tap, and `head` what the head reads."""

    layers: Sequence[Scales]
    head: Floats


_TINY = 1e-6  # of a root mean square: a channel that is always zero is not divided by zero
# Of the mean square of what a head reads, counted for each channel of a table that is looked up
# too. On SmolLM2 anything from 0 to 0.03 does, and 0.1 costs 0.0002 nats.
_LOOKED_UP = 0.03
# A scale beyond this says that a channel is all but dead, and is not worth its float range.
_MOST = 1e4


@dataclass(frozen=True)
class Fold:
    """What a weight [N, K] is multiplied with: rows [N], columns [K]; None for nothing."""

    rows: Floats | None = None
    columns: Floats | None = None

    def apply(self, values: Floats) -> Floats:
        """A matrix [N, K], or a vector [N] by rows alone, scaled in place."""
        if self.rows is not None:
            values *= self.rows if values.ndim == 1 else self.rows[:, None]
        if self.columns is not None:
            values *= self.columns
        return values


@dataclass(frozen=True)
class FoldedCheckpoint:
    """A checkpoint some of whose weights are scaled. added: vectors that it has besides."""

    source: Checkpoint
    folds: Mapping[str, Fold]
    added: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        return self.source.formats

    def read(self, name: str) -> Weight:
        if name in self.added:
            return Weight(FLOAT32, self.added[name])
        weight = self.source.read(name)
        fold = self.folds.get(name)
        return weight if fold is None else Weight(FLOAT32, fold.apply(weight.dequantized()))


def has_w8a8(phase: Phase) -> bool:
    """Whether some of the phase's products are of integers."""
    return any(fmt.w8a8 for fmt in phase.formats.values())


def has_integer_layers(phase: Phase) -> bool:
    """Whether some of its layers' are; a head may be alone in that."""
    return any(fmt.w8a8 for name, fmt in phase.formats.items() if name.startswith(LAYERS))


def can_be_smoothed(phase: Phase, config: ModelConfig) -> bool:
    """Whether there is anything in the phase that `smoothed` would scale."""
    layers = range(config.num_layers)
    return any(_usable(phase, config, i, tap) for i in layers for tap in _makers(config))


def channel_scales(
    checkpoint: Checkpoint, config: ModelConfig, windows: Ids, progress: Progress | None = None
) -> ChannelScales:
    """What the channels of each layer's taps, and of the head's, would best be divided by.

    windows: token ids of a calibration text [windows, chunk]. One layer's weights, and what it
    reads, are in memory at a time. Raises what `LayerRunner` raises.
    """
    runner = LayerRunner(checkpoint, config, windows)
    hidden = runner.embedded()
    found: list[Scales] = []
    for layer in range(config.num_layers):
        if progress is not None:
            progress(f"smoothing layer {layer}", layer, config.num_layers)
        weights = runner.weights(layer)
        seen = _Seen()
        hidden = runner.run(layer, weights, hidden, seen.add)
        found.append({tap: _tap_scale(tap, weights, seen) for tap in _makers(config)})
    total = np.zeros(config.hidden_size)
    for window in hidden:
        total += np.square(runner.head_inputs(window), dtype=np.float64).sum(0)
    squares = total / windows.size
    if config.tie_embeddings:
        # A channel that the final norm silences must not lose its codes: look-ups need them.
        squares += _LOOKED_UP * squares.mean()
    sizes = _column_sizes(checkpoint.read(_head(config)))
    return ChannelScales(found, _scale(np.asarray(np.sqrt(squares), np.float32), sizes))


def head_can_be_smoothed(phases: Sequence[Phase], config: ModelConfig) -> bool:
    """Whether the head is rounded to 8 bits; phases have one head."""
    name = _head(config)
    return all(
        phase.formats[name].dtype == "int8"
        and phase.formats[name] != phase.checkpoint.formats[name]
        for phase in phases
    )


def smoothed_head(phase: Phase, config: ModelConfig, scale: Floats) -> Phase:
    """The phase with its head smoothed. It is the same in all phases, so no name is added to
    `made`, and the table is written once.

    scale: see `ChannelScales`.
    """
    inverse = np.asarray(1 / scale, np.float32)
    folds = {FINAL_NORM: Fold(rows=inverse), _head(config): Fold(columns=scale)}
    if not config.tie_embeddings:
        return replace(phase, checkpoint=FoldedCheckpoint(phase.checkpoint, folds))
    checkpoint = FoldedCheckpoint(phase.checkpoint, folds, {EMBEDDING_SCALE: inverse})
    formats = {**phase.formats, EMBEDDING_SCALE: FLOAT32}
    return replace(phase, checkpoint=checkpoint, formats=formats)


def smoothed(phase: Phase, config: ModelConfig, scales: Sequence[Scales]) -> Phase:
    """The phase with those weights smoothed that are rounded to 8 bits in it.

    scales: see `ChannelScales`. What is kept as the source has it stays so, and what it reads.
    """
    folds: dict[str, Fold] = {}
    for layer, of_layer in enumerate(scales):
        used = {tap: scale for tap, scale in of_layer.items() if _usable(phase, config, layer, tap)}
        folds |= _folds(config, layer, used)
    if not folds:
        return phase
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


def _makers(config: ModelConfig) -> dict[Tap, tuple[str, ...]]:
    """The weights by whose rows each tap's channels are scaled; none where there is no norm."""
    norms = layer_norms(config)
    up = ("mlp.up_proj", "mlp.up_proj.bias") if config.mlp_bias else ("mlp.up_proj",)
    return {
        "attention_in": (norms.attention_in,) if norms.attention_in else (),
        "mlp_in": (norms.mlp_in,) if norms.mlp_in else (),
        "mlp_down": up,
    }


def _usable(phase: Phase, config: ModelConfig, layer: int, tap: Tap) -> bool:
    """Whether the tap's channels can be scaled, and are read by what is rounded to 8 bits."""
    source = phase.checkpoint.formats
    makers = _makers(config)[tap]

    def rounded(part: str) -> bool:
        name = layer_name(layer, part)
        return phase.formats[name] != source[name]

    def to_codes_of_8_bits(part: str) -> bool:
        return rounded(part) and phase.formats[layer_name(layer, part)].dtype == "int8"

    matrices = [maker for maker in makers if maker.endswith("_proj")]
    return bool(makers) and all(map(rounded, matrices)) and all(map(to_codes_of_8_bits, TAPS[tap]))


def _tap_scale(tap: Tap, weights: LayerWeights, seen: _Seen) -> Floats:
    joined = np.concatenate([weights[reader] for reader in TAPS[tap]])
    return _scale(seen.root_mean_square(tap), np.sqrt(np.mean(np.square(joined), 0)))


def _scale(read: Floats, weights: Floats) -> Floats:
    """The square root of what is read over the weights that read it, by root mean squares [K]."""
    scale = np.sqrt(np.maximum(read, _TINY) / np.maximum(weights, _TINY))
    middle = np.median(scale)
    return np.asarray(np.clip(scale, middle / _MOST, middle * _MOST), np.float32)


def _column_sizes(weight: Weight) -> Floats:
    """Root mean squares of the columns of a matrix [N, K], which is not expanded at once."""
    outputs, inputs = weight.codes.shape
    step = max(1, SLAB_BYTES // (4 * inputs))
    total = np.zeros(inputs)
    for start in range(0, outputs, step):
        total += np.square(weight.rows(start, start + step).dequantized()).sum(0)
    return np.asarray(np.sqrt(total / outputs), np.float32)


def _head(config: ModelConfig) -> str:
    return EMBEDDING if config.tie_embeddings else LM_HEAD


def _folds(config: ModelConfig, layer: int, scales: Scales) -> dict[str, Fold]:
    """The layer's scaled weights."""
    rows = {
        maker: np.asarray(1 / scale, np.float32)
        for tap, scale in scales.items()
        for maker in _makers(config)[tap]
    }
    columns = {reader: scale for tap, scale in scales.items() for reader in TAPS[tap]}
    return {
        layer_name(layer, name): Fold(rows.get(name), columns.get(name))
        for name in rows.keys() | columns.keys()
    }
