"""A checkpoint whose weights are rounded for what their layers read on a calibration text.

Layers are rounded one after another, each for the inputs that the rounded ones before it give, when
a writer first asks for one of its weights; only that layer is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ortolan.export.budget import measured, spent
from ortolan.export.calibration import TAPS, Floats, Ids, LayerRunner, PairedStats, Tap
from ortolan.export.gptq import Moments, gptq, nearest
from ortolan.export.phases import Phase, Progress
from ortolan.export.precision import Quantization
from ortolan.export.weights import Weight
from ortolan.export.write_weights import Checkpoint
from ortolan.graphs.formats import (
    EMBEDDING,
    FLOAT32,
    LAYERS,
    LM_HEAD,
    Formats,
    WeightFormat,
    layer_name,
    layer_norms,
)
from ortolan.graphs.manifest import ModelConfig

# `down` comes before `up`, whose rows take back what scales `down`.
_ORDER: tuple[Tap, ...] = ("attention_in", "attention_out", "mlp_down", "mlp_in")
# A channel's strength to this power is moved from what is read into the weights; 0 moves nothing.
_POWERS = (0.0, 0.1, 0.2)
_NEAREST_POWERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
_TRIED_ROWS = 512  # of a matrix, that powers are compared on
# Of a table that is looked up and multiplied with, what an error costs the look-up, against the
# mean of what it costs the product. On SmolLM2 anything from 0.03 to 0.3 does.
_LOOKED_UP = 0.1


@dataclass(frozen=True)
class Rounding:
    """How weights are rounded for their inputs.

    compensate: columns make up for what others lost (GPTQ); otherwise each element is rounded for
    itself. scale: strong channels are given finer steps, by factors that the norm before them, or
    the rows of `up` before `down`, take back (AWQ, Lin et al. 2023, arXiv:2306.00978). Factors
    between `v` and `o` would do as well, but they would scale the KV cache, which graphs of
    another precision read too. refinements: see `gptq`. correction: how much of what rounded layers
    before have changed a layer's weights make up for, before they are rounded; see
    `Moments.corrected`. All of it would fit the weights to the calibration text.
    """

    compensate: bool = True
    scale: bool = True
    refinements: int = 1
    correction: float = 0.5

    @property
    def powers(self) -> Sequence[float]:
        if not self.scale:
            return _POWERS[:1]
        return _POWERS if self.compensate else _NEAREST_POWERS

    def rounded(self, values: Floats, moments: Moments, fmt: WeightFormat) -> Weight:
        """The matrix [N, K] in blocks. Raises CheckpointError if an element is not finite."""
        if self.compensate:
            return gptq(values, moments, fmt, self.refinements)
        return nearest(values, fmt, moments.importance if self.scale else None)


DEFAULT_ROUNDING = Rounding()


def calibrated(
    phase: Phase,
    config: ModelConfig,
    windows: Ids,
    quantization: Quantization,
    progress: Progress | None = None,
) -> Phase:
    """The phase with its matrices rounded for a calibration text, [windows, chunk] token ids."""
    source, formats = phase.checkpoint, dict(phase.formats)
    if not _to_round(source.formats, formats):
        return phase
    if quantization.bits_per_weight is not None:
        affine = quantization.symmetric is False
        groups = measured(source, config, formats, windows, affine, progress)
        formats |= spent(groups, quantization.bits_per_weight)
    checkpoint = CalibratedCheckpoint(source, config, formats, windows)
    made = phase.made | checkpoint.made
    return replace(phase, checkpoint=checkpoint, formats=formats, made=made)


def _to_round(source: Formats, formats: Formats) -> frozenset[str]:
    """Names of weights that are stored in blocks which the source does not have."""
    return frozenset(name for name, fmt in formats.items() if fmt.blocked and fmt != source[name])


class CalibratedCheckpoint:
    """`source` with those matrices rounded whose format in `formats` is another one, and blocked.

    Layers are read in order, as a writer does; a layer that is over is not computed again.
    """

    def __init__(
        self,
        source: Checkpoint,
        config: ModelConfig,
        formats: Formats,
        windows: Ids,
        rounding: Rounding = DEFAULT_ROUNDING,
    ) -> None:
        """`windows`: token ids of the calibration text, [windows, chunk]."""
        self._source = source
        self._config = config
        self._wanted = formats
        self._rounding = rounding
        self._runner = LayerRunner(source, config, windows)
        self._rounds = _to_round(source.formats, formats)
        self._table: Weight | None = None
        # Behind rounded layers, and behind the source's own.
        self._hidden: Floats | None = None
        self._exact: Floats | None = None
        self._layer = -1
        self._made: dict[str, Weight] = {}

    @property
    def config(self) -> ModelConfig:
        return self._source.config

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        kept = self._source.formats
        return {name: self._wanted[name] if name in self._rounds else kept[name] for name in kept}

    @property
    def made(self) -> frozenset[str]:
        """Names of layers' weights that may not be the source's own values.

        A table and a head that are rounded serve all phases.
        """
        layers = {name for name in self._wanted if name.startswith(LAYERS)}
        return frozenset(layers if layers & self._rounds else ())

    def read(self, name: str) -> Weight:
        """Raises what reading the source raises, and CheckpointError for numbers not finite."""
        if name.startswith(LAYERS):
            layer = int(name[len(LAYERS) :].partition(".")[0])
            while self._layer < layer:
                self._advance()
            assert self._layer == layer, "layers are read in order"
            return self._made.get(name) or self._source.read(name)
        if name == EMBEDDING and name in self._rounds:
            return self._embedding()
        if name == LM_HEAD and name in self._rounds:
            while self._layer < self._config.num_layers - 1:
                self._advance()
            assert self._hidden is not None
            return self._rounded_head(name, self._hidden, self._exact)
        return self._source.read(name)

    def _embedding(self) -> Weight:
        if self._table is None:
            if self._config.tie_embeddings:
                self._table = self._rounded_head(EMBEDDING, self._final_hidden())
            else:
                table = self._source.read(EMBEDDING).dequantized()
                self._table = nearest(table, self._wanted[EMBEDDING])
        return self._table

    def _final_hidden(self) -> Floats:
        """Hidden states after the last layer, nothing rounded."""
        hidden = self._runner.embedded()
        for layer in range(self._config.num_layers):
            hidden = self._runner.run(layer, self._runner.weights(layer), hidden)
        return hidden

    def _rounded_head(self, name: str, hidden: Floats, exact: Floats | None = None) -> Weight:
        """A table or head for the hidden states that it reads; `exact` if it should read others."""
        stats = self._runner.head_statistics(hidden, exact)
        if name == EMBEDDING:
            mean = stats.seen.moments.diagonal().mean()
            stats.seen.moments[np.diag_indices(len(stats.cross))] += _LOOKED_UP * mean
        values = self._source.read(name).dequantized()
        moments = Moments.of(stats.seen.moments)
        if exact is not None:
            values = self._corrected(values, moments, stats)
        return self._rounding.rounded(values, moments, self._wanted[name])

    def _corrected(self, values: Floats, moments: Moments, stats: PairedStats) -> Floats:
        share = self._rounding.correction if self._rounding.compensate else 0.0
        if share == 0:
            return values
        return moments.corrected(values, stats.cross, stats.seen.moments, share)

    def _advance(self) -> None:
        """Round the next layer, and take the hidden states through it."""
        if self._hidden is None:
            looked_up = EMBEDDING in self._rounds
            table = self._embedding().dequantized() if looked_up else None
            self._hidden = self._runner.embedded(table)
            self._exact = self._runner.embedded()
        assert self._exact is not None
        self._layer += 1
        self._made = {}
        weights = self._runner.weights(self._layer)
        prefix = layer_name(self._layer, "")
        own = {name.removeprefix(prefix) for name in self._rounds if name.startswith(prefix)}
        if own:
            stats, self._exact = self._runner.paired_statistics(
                self._layer, weights, self._exact, self._hidden
            )
            for tap in _ORDER:
                names = [name for name in TAPS[tap] if name in own]
                if names:
                    self._round(tap, names, weights, stats.pop(tap))
        else:
            self._exact = self._runner.run(self._layer, weights, self._exact)
        self._hidden = self._runner.run(self._layer, weights, self._hidden)

    def _round(
        self, tap: Tap, names: Sequence[str], weights: dict[str, Floats], stats: PairedStats
    ) -> None:
        """Round the matrices that read `tap`, in `weights` too."""
        moments = Moments.of(stats.seen.moments)
        for name in names:
            weights[name] = self._corrected(weights[name], moments, stats)
        before = self._takes_back(tap, names)
        if before:
            scale = self._best_scale(names, weights, moments)
            for name in names:
                weights[name] = weights[name] * scale
            for name in before & weights.keys():
                values = weights[name] / (scale if weights[name].ndim == 1 else scale[:, None])
                weights[name] = values
                self._keep(name, Weight(FLOAT32, values))
            moments = moments.divided(scale)
        for name in names:
            fmt = self._wanted[layer_name(self._layer, name)]
            rounded = self._rounding.rounded(weights[name], moments, fmt)
            weights[name] = rounded.dequantized()
            self._keep(name, rounded)

    def _keep(self, name: str, weight: Weight) -> None:
        self._made[layer_name(self._layer, name)] = weight

    def _takes_back(self, tap: Tap, names: Sequence[str]) -> set[str]:
        """Weights whose outputs are what `tap` sees, to be divided by its scale; or none.

        Only where all readers of the tap are rounded to few bits, and what is before is float or
        rounded anyway: nothing that is kept as the source has it may change.
        """
        full = names == list(TAPS[tap])
        few = all(self._wanted[layer_name(self._layer, name)].bits < 8 for name in names)
        if not (self._rounding.scale and full and few):
            return set()
        norms = layer_norms(self._config)
        before = {
            "attention_in": norms.attention_in,
            "mlp_in": norms.mlp_in,
            "mlp_down": "mlp.up_proj",
        }.get(tap)
        if before is None:
            return set()
        if tap == "mlp_down" and layer_name(self._layer, before) not in self._rounds:
            return set()
        return {before, f"{before}.bias"}

    def _best_scale(
        self, names: Sequence[str], weights: Mapping[str, Floats], moments: Moments
    ) -> Floats:
        """For each channel, a factor; that power of its strength whose outputs are nearest."""
        rows = np.concatenate([weights[name] for name in names])
        rows = rows[:: max(1, len(rows) // _TRIED_ROWS)]
        fmt = self._wanted[layer_name(self._layer, names[0])]
        strength = np.sqrt(moments.damped.diagonal())
        strength = strength / np.exp(np.mean(np.log(strength)))
        quick = Rounding(self._rounding.compensate, self._rounding.scale, refinements=0)
        best: Floats = np.ones(len(strength), np.float32)
        least = np.inf
        for power in self._rounding.powers:
            scale = np.asarray(strength**power, np.float32)
            scaled = moments.divided(scale)
            values = rows * scale
            error = scaled.error(values - quick.rounded(values, scaled, fmt).dequantized())
            if error < least:
                best, least = scale, error
        return best
