"""Rope scalings as divisors of the frequencies and a magnitude.

Sources: the formulas of Hugging Face's modeling_rope_utils; Peng et al. 2023, arXiv:2309.00071
(yarn); Ding et al. 2024, arXiv:2402.13753 (longrope).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import CheckpointError, UsageError
from ortolan.export.settings import Settings

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """What ModelConfig says of rotary embedding.

    max_context: positions it is made for; window_theta: see ModelConfig.window_rope_theta.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_context: int
    divisors: list[float] | None = None
    magnitude: float = 1.0
    window_theta: float | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of ModelConfig."""
        return {
            "rope_kind": self.kind,
            "rope_theta": self.theta,
            "rotary_dim": self.rotary_dim,
            "max_context": self.max_context,
            "rope_divisors": self.divisors,
            "rope_magnitude": self.magnitude,
            "window_rope_theta": self.window_theta,
        }


def read_rope(
    settings: Settings,
    head_dim: int,
    requested_context: int | None,
    default_theta: float,
    default_window_theta: float | None = None,
) -> Rope:
    """Rope from a Hugging Face config, in either spelling.

    transformers 5 writes one object `rope_parameters`; earlier ones `rope_theta` and
    `rope_scaling`. requested_context: the positions asked for, or None; longrope has factors for
    contexts within the original one and others beyond, and is made for one of them.
    default_window_theta: for families whose layers with a window have rope of their own, in
    `rope_parameters` by kind of layer; earlier, their base was `rope_local_base_freq`.
    Raises ConfigError for a kind that is not known, and for `dynamic`, whose frequencies change
    with the length of the text; CheckpointError for settings that contradict each other.
    """
    positions = settings.integer("max_position_embeddings")
    if requested_context is not None and requested_context > positions:
        raise UsageError(
            f"--max-context {requested_context} is not possible; this checkpoint allows 2 to "
            f"{positions}"
        )
    scaling, window_theta = settings.nested("rope_parameters"), None
    if default_window_theta is not None:
        kinds = scaling or Settings(settings.where, {})
        window_theta = _window_theta(
            settings, kinds.nested("sliding_attention"), default_window_theta
        )
        scaling = kinds.nested("full_attention")
    scaling = scaling or settings.nested("rope_scaling")
    values = scaling or Settings(settings.where, {}, "rope_parameters.")
    merged = Settings(
        settings.where, {key: _agreed(settings, values, key) for key in _IN_EITHER_PLACE}
    )
    kind = _kind(values)
    base = float(merged.number("rope_theta", default_theta))
    partial = merged.number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial)  # Hugging Face cuts off too
    if base <= 1 or partial > 1 or rotary_dim < 2:
        key = "rope_theta" if base <= 1 else "partial_rotary_factor"
        raise merged.unfit(key, merged.get(key), "a number that leaves frequencies to turn by")
    found = _Found(values, positions, merged.get(_ORIGINAL), base, rotary_dim)
    try:
        divisors, magnitude, context = _scaling(kind, found, requested_context)
    except (ArithmeticError, ValueError) as exc:
        raise CheckpointError(
            f"{settings.where}: {values.prefix}* give no numbers ({exc})"
        ) from exc
    return Rope(
        kind=kind,
        theta=base,
        rotary_dim=rotary_dim,
        max_context=context,
        divisors=None if divisors is None else [float(d) for d in divisors],
        magnitude=magnitude,
        window_theta=window_theta,
    )


def _window_theta(settings: Settings, values: Settings | None, default: float) -> float:
    """The base of layers with a window, whose rope is not scaled."""
    values = values or Settings(settings.where, {}, "rope_parameters.sliding_attention.")
    if (kind := _kind(values)) != "default":
        raise values.unsupported("rope_type", kind)
    key = "rope_local_base_freq"
    merged = Settings(settings.where, {key: _agreed(settings, values, key, "rope_theta")})
    base = float(merged.number(key, default))
    if base <= 1:
        raise merged.unfit(key, base, "a number above 1")
    return base


_ORIGINAL = "original_max_position_embeddings"
_IN_EITHER_PLACE = ("rope_theta", "partial_rotary_factor", _ORIGINAL)


def _agreed(outer: Settings, inner: Settings, key: str, inner_key: str | None = None) -> Any:
    """A setting that old configs have beside the scaling and new ones in it."""
    inner_key = inner_key or key
    a, b = outer.get(key), inner.get(inner_key)
    if a is not None and b is not None and a != b:
        raise CheckpointError(
            f"{outer.where}: {key} is {short(a)}, but {inner.prefix}{inner_key} is {short(b)}"
        )
    return a if b is None else b


def _kind(values: Settings) -> str:
    """`rope_type`, which was spelled `type`; some configs have both."""
    kind, old = values.get("rope_type"), values.get("type")
    if kind is not None and old is not None and kind != old:
        raise CheckpointError(
            f"{values.where}: {values.prefix}rope_type is {short(kind)}, but "
            f"{values.prefix}type is {short(old)}"
        )
    kind = old if kind is None else kind
    if kind is None:
        return "default"
    if not isinstance(kind, str):
        raise values.unsupported("rope_type", kind)
    return kind


@dataclass(frozen=True)
class _Found:
    """What the scalings are computed from. original: positions before they were extended."""

    values: Settings
    positions: int
    original: Any
    base: float
    rotary_dim: int


def _scaling(
    kind: str, found: _Found, requested_context: int | None
) -> tuple[Array | list[float] | None, float, int]:
    """Divisors, magnitude, and the positions that they are for."""
    values, positions = found.values, found.positions
    context = requested_context or positions
    match kind:
        case "default":
            return None, 1.0, context
        case "linear":
            return np.full(found.rotary_dim // 2, _factor(values)), 1.0, context
        case "llama3":
            exponents = np.arange(0, found.rotary_dim, 2, dtype=np.float64) / found.rotary_dim
            known = _original(values, found.original)
            return _llama3(values, found.base**-exponents, known), 1.0, context
        case "yarn":
            known = positions if found.original is None else _original(values, found.original)
            return *yarn(values, found.base, found.rotary_dim, known), context
        case "longrope" | "su":
            known = _original(values, found.original)
            # Exact for every text that fits: the factors change with the text's length otherwise.
            context = requested_context or min(known, positions)
            both = {
                name: values.numbers(name, found.rotary_dim // 2)
                for name in ("short_factor", "long_factor")
            }
            divisors = both["long_factor" if context > known else "short_factor"]
            return divisors, _longrope_magnitude(values, positions, known), context
        case other:
            raise values.unsupported("rope_type", other)


def _factor(values: Settings) -> float:
    factor = values.number("factor")
    if factor < 1:
        raise values.unfit("factor", factor, "a number from 1 up")
    return factor


def _original(values: Settings, original: object) -> int:
    if isinstance(original, int) and not isinstance(original, bool) and original > 0:
        return original
    raise values.unfit(_ORIGINAL, original, "a whole number")


def _llama3(values: Settings, frequencies: Array, original: int) -> Array:
    """Long waves are stretched by the factor, short ones not, those between in part."""
    factor = _factor(values)
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    if low >= high:
        raise values.unfit("low_freq_factor", low, f"less than high_freq_factor {high}")
    waves_in_context = original * frequencies / (2 * math.pi)
    smooth = np.clip((waves_in_context - low) / (high - low), 0.0, 1.0)
    scaled: Array = 1.0 / ((1 - smooth) / factor + smooth)
    return scaled


def yarn(values: Settings, base: float, dim: int, original: int) -> tuple[Array, float]:
    """Divisors and magnitude from settings that are named as in Hugging Face's configs."""
    factor = _factor(values)
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
