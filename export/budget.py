"""A budget of bits per weight, spent on the matrices where it buys most.

What a group of matrices costs, those of a layer that read the same inputs, is measured: with only
them rounded, the model runs to its end, and its next-token distributions are compared. Costs in
other formats follow from the error of the group's outputs, to which divergence is proportional
while it is small. Then the step to more bits that saves most per bit is taken, again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ortolan.errors import UsageError
from ortolan.export.calibration import TAPS, Floats, Ids, LayerRunner, LayerWeights, Tap
from ortolan.export.gptq import Moments, gptq, nearest
from ortolan.export.write_weights import Checkpoint
from ortolan.graphs.formats import (
    EMBEDDING,
    LM_HEAD,
    Formats,
    StorageDtype,
    WeightFormat,
    layer_name,
)
from ortolan.graphs.manifest import ModelConfig

Progress = Callable[[str, int, int], None]

_BLOCKS: Mapping[StorageDtype, tuple[int, ...]] = {"int4": (256, 128, 64, 32), "int8": (128,)}
_PROBE = WeightFormat("int4", 128)
_PROBED_WINDOWS, _PROBED_TOKENS = 2, 128  # that distributions are compared on
_SAMPLED_ROWS = 256  # of a group, that formats are compared on


@dataclass(frozen=True)
class Group:
    """A layer's matrices that read the same inputs.

    inputs: K of the matrices; weights: their elements in all. costs: divergence in nats that each
    format is expected to add.
    """

    layer: int
    tap: Tap
    names: tuple[str, ...]
    inputs: int
    weights: int
    costs: Mapping[WeightFormat, float]

    def bits(self, fmt: WeightFormat) -> float:
        """That the group takes in this format, scales and offsets, which are float32, included."""
        numbers = fmt.num_blocks(self.inputs) * (2 if fmt.affine else 1)
        return self.weights * (fmt.bits + 32 * numbers / self.inputs)


def candidates(affine: bool) -> list[WeightFormat]:
    """Formats that a group may have."""
    return [
        WeightFormat(dtype, block_size, affine)
        for dtype, sizes in _BLOCKS.items()
        for block_size in sizes
    ]


def spent(groups: Sequence[Group], budget: float) -> dict[str, WeightFormat]:
    """The format of each matrix, by name, that a budget of bits per weight is best spent on.

    Raises UsageError if the budget is below what the cheapest formats take.
    """
    hulls = [_hull(group) for group in groups]
    chosen = [hull[0] for hull in hulls]
    total = sum(group.weights for group in groups)
    least = sum(group.bits(fmt) for group, fmt in zip(groups, chosen, strict=True))
    left = budget * total - least
    if left < 0:
        raise UsageError(
            f"--bits-per-weight {budget:g} is too little: blocks of 4 bits take "
            f"{least / total:.3f} in this model, scales included"
        )
    # Gains fall along a hull, so that a group's steps come in order.
    steps = sorted(
        (-gain, index, position)
        for index, hull in enumerate(hulls)
        for position, gain in enumerate(_gains(groups[index], hull))
    )
    stopped: set[int] = set()
    for _, index, position in steps:
        group, before, after = groups[index], *hulls[index][position : position + 2]
        price = group.bits(after) - group.bits(before)
        if index in stopped or price > left:
            stopped.add(index)
            continue
        left -= price
        chosen[index] = after
    return {
        layer_name(group.layer, name): fmt
        for group, fmt in zip(groups, chosen, strict=True)
        for name in group.names
    }


def _hull(group: Group) -> list[WeightFormat]:
    """The formats worth their bits: of the others, some mixture of these is nearer and cheaper."""
    hull: list[WeightFormat] = []
    for fmt, cost in sorted(group.costs.items(), key=lambda item: (group.bits(item[0]), item[1])):
        if hull and cost >= group.costs[hull[-1]]:
            continue
        while len(hull) > 1 and _gain(group, *hull[-2:]) <= _gain(group, hull[-1], fmt):
            hull.pop()
        hull.append(fmt)
    return hull


def _gain(group: Group, before: WeightFormat, after: WeightFormat) -> float:
    """What a step saves for each bit that it takes."""
    saved = group.costs[before] - group.costs[after]
    return saved / (group.bits(after) - group.bits(before))


def _gains(group: Group, hull: Sequence[WeightFormat]) -> list[float]:
    return [_gain(group, *pair) for pair in pairwise(hull)]


def measured(
    checkpoint: Checkpoint,
    config: ModelConfig,
    formats: Formats,
    windows: Ids,
    affine: bool,
    progress: Progress | None = None,
) -> list[Group]:
    """The groups of matrices that `formats` would have in int4 blocks, and what formats cost.

    One pass through the model: hidden states with one group rounded each go on side by side.
    """
    runner = LayerRunner(checkpoint, config, windows)
    probe = LayerRunner(checkpoint, config, windows[:_PROBED_WINDOWS, :_PROBED_TOKENS])
    hidden = runner.embedded()
    streams = probe.embedded()[None]  # [streams, windows, chunk, hidden], the exact one first
    found: list[Group] = []
    for layer in range(config.num_layers):
        if progress is not None:
            progress(f"measuring layer {layer}", layer, config.num_layers)
        weights = runner.weights(layer)
        stats, hidden = runner.statistics(layer, weights, hidden)
        before = streams[0]
        flat = streams.reshape(-1, *streams.shape[2:])
        streams = probe.run(layer, weights, flat).reshape(streams.shape)
        new = []
        for tap, names in TAPS.items():
            own = tuple(name for name in names if _rounds(checkpoint, formats, layer, name))
            if not own:
                continue
            moments = Moments.of(stats.pop(tap).moments)
            changed, error = _probed(own, weights, moments)
            new.append(probe.run(layer, changed, before))
            errors = _errors(own, weights, moments, candidates(affine))
            size = sum(weights[name].size for name in own)
            costs = {fmt: each / error for fmt, each in errors.items()}
            inputs = len(moments.order)
            found.append(Group(layer, tap, own, inputs, size, costs))
        streams = np.concatenate([streams, np.stack(new)]) if new else streams
    divergences = _divergences(checkpoint, config, probe, streams)
    return [
        replace(group, costs={fmt: ratio * kl for fmt, ratio in group.costs.items()})
        for group, kl in zip(found, divergences, strict=True)
    ]


def _rounds(checkpoint: Checkpoint, formats: Formats, layer: int, name: str) -> bool:
    full = layer_name(layer, name)
    return formats[full].dtype == "int4" and formats[full] != checkpoint.formats[full]


def _probed(
    names: Sequence[str], weights: LayerWeights, moments: Moments
) -> tuple[dict[str, Floats], float]:
    """The weights with these rounded, each element for itself, and the error of their outputs."""
    changed, error = dict(weights), 0.0
    for name in names:
        changed[name] = nearest(weights[name], _PROBE).dequantized()
        error += moments.error(weights[name] - changed[name])
    return changed, max(error, np.finfo(float).tiny)


def _errors(
    names: Sequence[str],
    weights: LayerWeights,
    moments: Moments,
    formats: Sequence[WeightFormat],
) -> dict[WeightFormat, float]:
    """The error of the group's outputs in each format, from some of its rows."""
    rows = np.concatenate([weights[name] for name in names])
    every = max(1, len(rows) // _SAMPLED_ROWS)
    sample = rows[::every]
    share = len(rows) / len(sample)
    return {
        fmt: share * moments.error(sample - gptq(sample, moments, fmt, 0).dequantized())
        for fmt in formats
    }


def _divergences(
    checkpoint: Checkpoint, config: ModelConfig, probe: LayerRunner, streams: Floats
) -> list[float]:
    """Mean KL of each stream but the first from the first, in nats."""
    name = EMBEDDING if config.tie_embeddings else LM_HEAD
    head = checkpoint.read(name).dequantized()
    found = np.zeros(len(streams) - 1)
    for window in range(streams.shape[1]):
        exact = _log_probabilities(config, probe.head_inputs(streams[0, window]) @ head.T)
        for i, stream in enumerate(streams[1:, window]):
            other = _log_probabilities(config, probe.head_inputs(stream) @ head.T)
            found[i] += np.sum(np.exp(exact) * (exact - other))
    divergences = found / (streams.shape[1] * streams.shape[2])
    # What float32 leaves of a divergence next to nothing may be below it.
    return [max(float(kl), 1e-9) for kl in divergences]


def _log_probabilities(config: ModelConfig, logits: Floats) -> Floats:
    logits /= np.float32(config.logits_divisor)
    if config.logits_softcap:
        cap = np.float32(config.logits_softcap)
        logits = np.tanh(logits / cap) * cap
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits
