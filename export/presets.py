"""Presets: precisions with a name, a purpose, and a bound on what they may cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ortolan.export.precision import DEFAULT_QUANTIZATION, Quantization, WeightsChoice
from ortolan.graphs.manifest import AccuracyReport, Manifest

PresetName = Literal["exact", "balanced", "fast", "small"]


@dataclass(frozen=True)
class Bound:
    """What a bundle may lose, over all texts of its accuracy report: see TextAccuracy.

    mean_kl: at most so many nats; top1: at least this share of equal likeliest tokens.
    """

    mean_kl: float
    top1: float

    def exceeded_by(self, report: AccuracyReport) -> str | None:
        """What is beyond it, or None. Written so that NaN exceeds."""
        total = report.total
        found = []
        if not total.mean_kl <= self.mean_kl:
            found.append(f"mean KL is {total.mean_kl:.2g}, at most {self.mean_kl:g} is promised")
        if not total.top1_agreement >= self.top1:
            found.append(
                f"the likeliest token is the same for {total.top1_agreement:.1%}, at least "
                f"{self.top1:.0%} is promised"
            )
        return "; ".join(found) or None


@dataclass(frozen=True)
class Preset:
    """Precisions by phase, and their bound. summary: for whom it is, in a line."""

    summary: str
    prefill: WeightsChoice
    decode: WeightsChoice
    bound: Bound
    quantization: Quantization = DEFAULT_QUANTIZATION

    def options(self) -> dict[str, Any]:
        """Fields of ExportOptions."""
        return {
            "prefill_weights": self.prefill,
            "decode_weights": self.decode,
            "quantization": self.quantization,
        }


def _int4(block_size: int) -> Quantization:
    """Calibrated; a table, which is looked up too, keeps 8 bits."""
    return Quantization(block_size=block_size, embedding="blocks", lm_head="blocks", calibrate=True)


# Bounds are what SmolLM2's published Q4_1 file keeps to (docs/presets.md), with some room: a model
# of four bits rounded a second time loses more than one that comes in 16.
PRESETS: Mapping[PresetName, Preset] = {
    "exact": Preset(
        summary="the source's own precision, whatever it takes",
        prefill="source",
        decode="source",
        bound=Bound(mean_kl=0.01, top1=0.94),
    ),
    "balanced": Preset(
        summary="faster, for a loss that is hard to see",
        prefill="w8a8",
        decode="blocks",
        bound=Bound(mean_kl=0.015, top1=0.94),
        # A head in blocks of 32, as many sources have it, is read a third slower.
        quantization=Quantization(block_size=64, lm_head="int8"),
    ),
    "fast": Preset(
        summary="single answers faster still; for sources of 16 bits",
        prefill="w8a8",
        decode="int4",
        bound=Bound(mean_kl=0.2, top1=0.72),
        quantization=_int4(64),
    ),
    "small": Preset(
        summary="the smallest bundle; for sources of 16 bits",
        prefill="int4",
        decode="int4",
        bound=Bound(mean_kl=0.25, top1=0.7),
        quantization=_int4(128),
    ),
}
DEFAULT_PRESET: PresetName = "balanced"  # where quantizing is asked for, and no more is said
assert set(PRESETS) == set(get_args(PresetName))


def broken_promise(name: PresetName, manifest: Manifest) -> str | None:
    """A sentence if a report of the bundle is beyond the preset's bound."""
    for report in manifest.accuracy_reports:
        if (found := PRESETS[name].bound.exceeded_by(report)) is not None:
            where = f" in {report.phase}" if report.phase else ""
            return f"{found} by preset {name}{where}"
    return None
