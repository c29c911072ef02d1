"""Rope as GGUF files describe it: settings, and tensors of divisors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.rope import Rope, yarn
from ortolan.export.settings import Settings

ALL_LENGTHS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_FACTORS = ("rope.scaling.factor", "rope.scale_linear")  # the second as older files have it

# A tensor's name -> its numbers, or None where the file has no such tensor.
ReadVector = Callable[[str], list[float] | None]


def read_gguf_rope(
    settings: Settings, head_dim: int, vector: ReadVector, requested_context: int | None
) -> Rope:
    """Rope as llama.cpp computes it.

    requested_context: the positions asked for, or None; see rope.read_rope.
    Raises ConfigError for a kind that is not known.
    Source: llama.cpp's llama_model::load_hparams, llama_context and ggml_rope_ext.
    """
    base = float(settings.number("rope.freq_base", 10000.0))
    if base <= 1:
        raise settings.unfit("rope.freq_base", base, "a number above 1")
    positions = settings.integer("context_length")
    dim = settings.integer("rope.dimension_count", head_dim)
    known = settings.integer("rope.scaling.original_context_length", positions)
    try:
        name, divisors, magnitude = _scaling(settings, base, dim, known)
    except (ArithmeticError, ValueError) as exc:
        raise CheckpointError(
            f"{settings.where}: {settings.prefix}rope.* give no numbers ({exc})"
        ) from exc

    context, source = positions, ALL_LENGTHS
    if name == "longrope" or vector(LONG) is not None or vector(SHORT) is not None:
        if vector(ALL_LENGTHS) is not None:
            raise ConfigError(
                f"{settings.where}: tensors {ALL_LENGTHS} and {LONG} exclude each other"
            )
        # Exact for every text that fits: the factors change with the context's size otherwise.
        context, name = min(requested_context or known, positions), "longrope"
        source = LONG if context > known else SHORT
    factors = vector(source)
    if factors is not None:
        if len(factors) != dim // 2 or not all(1e-18 < number < 1e18 for number in factors):
            raise CheckpointError(
                f"{settings.where}: tensor {source} does not hold {dim // 2} numbers above 0"
            )
        divisors = divisors * np.array(factors)
        name = "rope_freqs" if name == "default" else name
    elif name == "longrope":
        raise CheckpointError(f"{settings.where}: tensor {source} is missing, a part of longrope")
    return Rope(
        kind=name,
        theta=base,
        rotary_dim=dim,
        max_context=context,
        divisors=None if name == "default" else [float(d) for d in divisors],
        magnitude=magnitude,
    )


def _scaling(
    settings: Settings, base: float, dim: int, known: int
) -> tuple[str, npt.NDArray[np.float64], float]:
    """The kind that the settings tell, its divisors, and the magnitude."""
    magnitude = float(settings.number("rope.scaling.attn_factor", 1.0))
    kind = settings.get("rope.scaling.type")
    if kind is None and any(settings.get(key) is not None for key in _FACTORS):
        kind = "linear"  # what llama.cpp takes for granted
    match kind:
        case None | "none" | "longrope":
            for key in _FACTORS:
                settings.expect(key, 0.0, 1.0)
            return "longrope" if kind == "longrope" else "default", np.ones(dim // 2), magnitude
        case "linear":
            return "linear", np.full(dim // 2, _factor(settings)), magnitude
        case "yarn":
            settings.expect("rope.scaling.attn_factor", 1.0)  # llama.cpp's versions differ in it
            settings.expect("rope.scaling.yarn_ext_factor", 1.0)
            settings.expect("rope.scaling.yarn_attn_factor", 1.0)
            values = {
                "factor": _factor(settings),
                "beta_fast": settings.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": settings.get("rope.scaling.yarn_beta_slow"),
            }
            inner = Settings(settings.where, values, f"{settings.prefix}rope.scaling.yarn_")
            return "yarn", *yarn(inner, base, dim, known)
        case other:
            raise settings.unsupported("rope.scaling.type", other)


def _factor(settings: Settings) -> float:
    """The stretch; 0 stands for none, as in llama.cpp."""
    new, old = _FACTORS
    key = old if settings.get(new) is None and settings.get(old) is not None else new
    return 1.0 if settings.get(key) == 0 else float(settings.number(key))
