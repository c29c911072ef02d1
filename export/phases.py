"""Weights by phase: prefill is bound by arithmetic, decode by bytes, and each has its precision.

Keys and values mean the same in both, so a cache that one wrote the other reads: what is folded
into weights for one phase's sake never touches them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from ortolan.export.precision import Quantization, WeightsChoice, choose_formats
from ortolan.export.weights_file import WeightsFile
from ortolan.export.write_weights import Checkpoint, WeightsWriter
from ortolan.graphs import contract as c
from ortolan.graphs.flavor import Flavor
from ortolan.graphs.formats import EMBEDDING, LM_HEAD, Formats, WeightFormat
from ortolan.graphs.manifest import ModelConfig, WeightGroup

Progress = Callable[[str, int, int], None]

_PREFILLS = (c.PREFILL, c.PREFILL_RAGGED)


@dataclass(frozen=True)
class Phase:
    """Graphs of a bundle that compute with the same weights.

    name: "prefill", "decode", or "" where one phase is all. checkpoint: what gives the weights,
    those named in `made` scaled or rounded for this phase; formats: what they are stored in.
    """

    name: str
    graphs: tuple[str, ...]
    checkpoint: Checkpoint
    formats: Formats
    made: frozenset[str] = frozenset()


def plan_phases(
    checkpoint: Checkpoint,
    config: ModelConfig,
    prefill: WeightsChoice,
    decode: WeightsChoice,
    quantization: Quantization,
) -> list[Phase]:
    """One phase, or decode and prefill where their weights differ.

    Then a graph that decodes with prefill's weights comes free: it needs no tensor of its own.
    The embedding and the head are decode's in both phases: prefill looks few rows up, and needs
    few logits. Raises UsageError if the choices contradict each other or the model.
    """
    decode_formats = _formats(checkpoint.formats, config, decode, prefill, quantization)
    if prefill == decode:
        return [Phase("", (c.DECODE, *_PREFILLS), checkpoint, decode_formats)]
    prefill_formats = _formats(checkpoint.formats, config, prefill, decode, quantization)
    for name in (EMBEDDING, LM_HEAD):
        if name in prefill_formats:
            prefill_formats[name] = decode_formats[name]
    if prefill_formats == decode_formats:
        return [Phase("", (c.DECODE, *_PREFILLS), checkpoint, decode_formats)]
    return [
        Phase("decode", (c.DECODE,), checkpoint, decode_formats),
        Phase("prefill", (c.DECODE_MANY, *_PREFILLS), checkpoint, prefill_formats),
    ]


def _formats(
    source: Formats,
    config: ModelConfig,
    weights: WeightsChoice,
    other: WeightsChoice,
    quantization: Quantization,
) -> dict[str, WeightFormat]:
    """The formats of one phase. Options of rounding are for those phases that have blocks."""
    rounded = ("int8", "int4", "blocks", "w8a8")
    if weights not in rounded and other in rounded:  # the other phase has a use for them
        quantization = Quantization(lm_head=quantization.lm_head, embedding=quantization.embedding)
    return choose_formats(source, config, weights, quantization)


def write_phases(
    phases: Sequence[Phase],
    config: ModelConfig,
    flavor: Flavor,
    file: WeightsFile,
    progress: Progress | None,
) -> tuple[dict[str, Mapping[str, ir.ExternalTensor]], list[WeightGroup]]:
    """All weights, each tensor once: by graph, the tensors that it reads; and the groups.

    A tensor that a later phase has in common with the first is not written again.
    """
    writers: list[WeightsWriter] = []
    for phase in phases:
        beside = writers[0] if writers else None
        args = phase.checkpoint, config, phase.formats, file, flavor
        writers.append(WeightsWriter(*args, made=phase.made, beside=beside))
    plans = [list(writer.items()) for writer in writers]
    total = sum(map(len, plans))
    tensors: dict[str, Mapping[str, ir.ExternalTensor]] = {}
    groups: list[WeightGroup] = []
    done = 0
    for phase, writer, items in zip(phases, writers, plans, strict=True):
        for item in items:
            if progress is not None:
                progress(f"{phase.name} {item.name}".lstrip(), done, total)
            writer.run(item)
            done += 1
        # A later phase replaces the names that it writes itself, and keeps the others.
        tensors |= {graph: dict(file.tensors) for graph in phase.graphs}
        groups += [replace(group, phase=phase.name) for group in writer.groups]
    return tensors, groups
