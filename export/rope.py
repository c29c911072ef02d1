"""Rope scalings as divisors of the frequencies and a magnitude.

Sources: the formulas of Hugging Face's modeling_rope_utils; Peng et al. 2023, arXiv:2309.00071
(yarn); Ding et al. 2024, arXiv:2402.13753 (longrope).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import UsageError
from ortolan.export.settings import Settings

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """What ModelConfig says of rotary embedding. max_context: positions it is made for."""

    kind: str
    theta: float
    rotary_dim: int
    max_context: int
    divisors: list[float] | None = None
    magnitude: float = 1.0

    def fields(self) -> dict[str, Any]:
        """The fields of ModelConfig."""
        return {
            "rope_kind": self.kind,
            "rope_theta": self.theta,
            "rotary_dim": self.rotary_dim,
            "max_context": self.max_context,
            "rope_divisors": self.divisors,
            "rope_magnitude": self.magnitude,
        }


def read_rope(settings: Settings, head_dim: int, requested_context: int | None) -> Rope:
    """Rope from a Hugging Face config, in either spelling.

    transformers 5 writes one object `rope_parameters`; earlier ones `rope_theta` and
    `rope_scaling`. requested_context: the positions asked for, or None; longrope has factors for
    contexts within the original one and others beyond, and is made for one of them.
    Raises ConfigError for a kind that is not known, and for `dynamic`, whose frequencies change
    with the length of the text.
    """
    positions = settings.integer("max_position_embeddings")
    if requested_context is not None and requested_context > positions:
        raise UsageError(
            f"--max-context {requested_context} is not possible; this checkpoint allows 2 to "
            f"{positions}"
        )
    theta = settings.get("rope_theta")
    partial = settings.get("partial_rotary_factor")
    original = settings.get("original_max_position_embeddings")
    scaling = settings.nested("rope_parameters") or settings.nested("rope_scaling")
    values = scaling or Settings(settings.where, {}, "rope_parameters.")
    kind = values.get("rope_type")
    kind = values.get("type") if kind is None else kind
    theta = theta if values.get("rope_theta") is None else values.get("rope_theta")
    partial = partial if (own := values.get("partial_rotary_factor")) is None else own
    merged = Settings(
        settings.where,
        {"rope_theta": theta, "partial_rotary_factor": partial},
    )
    base = float(merged.number("rope_theta", 10000.0))
    rotary_dim = round(head_dim * merged.number("partial_rotary_factor", 1.0))
    frequencies = base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if (inner := values.get("original_max_position_embeddings")) is not None:
        original = inner

    divisors: Array | list[float] | None = None
    magnitude, context = 1.0, requested_context or positions
    match kind or "default":
        case "default":
            pass
        case "linear":
            divisors = np.full(rotary_dim // 2, values.number("factor"))
        case "llama3":
            divisors = _llama3(values, frequencies, _original(values, original))
        case "yarn":
            known = positions if original is None else _original(values, original)
            divisors, magnitude = _yarn(values, base, rotary_dim, known)
        case "longrope" | "su":
            known = _original(values, original)
            # Exact for every text that fits: the factors change with the text's length otherwise.
            context = requested_context or min(known, positions)
            name = "long_factor" if context > known else "short_factor"
            divisors = values.numbers(name, rotary_dim // 2)
            values.ignore("long_factor", "short_factor")
            magnitude = _longrope_magnitude(values, positions, known)
        case other:
            raise values.unsupported("rope_type", other)
    return Rope(
        kind=str(kind or "default"),
        theta=base,
        rotary_dim=rotary_dim,
        max_context=context,
        divisors=None if divisors is None else [float(d) for d in divisors],
        magnitude=magnitude,
    )


def _original(values: Settings, original: object) -> int:
    if isinstance(original, int) and not isinstance(original, bool) and original > 0:
        return original
    raise values.unfit("original_max_position_embeddings", original, "a whole number")


def _llama3(values: Settings, frequencies: Array, original: int) -> Array:
    """Long waves are stretched by the factor, short ones not, those between in part."""
    factor = values.number("factor")
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    waves_in_context = original * frequencies / (2 * math.pi)
    smooth = np.clip((waves_in_context - low) / (high - low), 0.0, 1.0)
    scaled: Array = 1.0 / ((1 - smooth) / factor + smooth)
    return scaled


def _yarn(values: Settings, base: float, dim: int, original: int) -> tuple[Array, float]:
    factor = values.number("factor")
    fast, slow = values.number("beta_fast", 32.0), values.number("beta_slow", 1.0)

    def dimension(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return dim * turns / (2 * math.log(base))

    low, high = dimension(fast), dimension(slow)
    if values.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    kept = 1 - np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = values.get("attention_factor")
    part, whole = values.get("mscale"), values.get("mscale_all_dim")
    if given is not None:
        magnitude = values.number("attention_factor")
    elif part and whole:
        magnitude = mscale(values.number("mscale")) / mscale(values.number("mscale_all_dim"))
    else:
        magnitude = mscale(1.0)
    return 1.0 / ((1 - kept) / factor + kept), magnitude


def _longrope_magnitude(values: Settings, positions: int, original: int) -> float:
    if values.get("attention_factor") is not None:
        return values.number("attention_factor")
    factor = values.number("factor", positions / original)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
