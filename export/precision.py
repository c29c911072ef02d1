"""Which format each weight is stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ortolan.errors import UsageError
from ortolan.graphs.formats import (
    EMBEDDING,
    FLOAT32,
    LM_HEAD,
    W8A8,
    Formats,
    WeightFormat,
    layer_name,
    weight_shapes,
)
from ortolan.graphs.manifest import ModelConfig

WeightsChoice = Literal["source", "float32", "int8", "int4", "w8a8", "blocks"]

BLOCK_SIZES = (16, 32, 64, 128, 256)
DEFAULT_BLOCK_SIZE = 32
# Beside w8a8: what these read has the largest numbers of all in the first layers and in the last,
# where a loss is either carried through all others or made up for by none (docs/presets.md).
_IN_BLOCKS = "mlp.down_proj"
_SHARE_IN_BLOCKS = 1 / 4  # of the layers, at either end
_ROUNDED = ("int8", "int4", "blocks", "w8a8")


@dataclass(frozen=True)
class Quantization:
    """How weights are rounded, and what differs from the rest.

    block_size: inputs that share a scale; None stands for 32.
    symmetric: codes times a scale, or (False) plus an offset per block; None stands for True.
    lm_head, embedding: formats of their own; None follows the other weights.
    calibrate: round for what the layers read on a text, not each weight for itself.
    bits_per_weight: an average over the layers' matrices in int4, scales included, that is spent
    where it buys most; some become int8, and blocks have several sizes.

    Of the choices, "blocks" stands for the source's own blocks where they have no offsets, and
    for int8 otherwise: in small models offsets cost more time than twice the bytes.
    Raises UsageError for a block size or an average that there is not.
    """

    block_size: int | None = None
    symmetric: bool | None = None
    lm_head: WeightsChoice | None = None
    embedding: WeightsChoice | None = None
    calibrate: bool = False
    bits_per_weight: float | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            known = ", ".join(map(str, BLOCK_SIZES))
            raise UsageError(f"--block-size {self.block_size} is not possible; choose from {known}")
        if self.bits_per_weight is not None:
            self._check_budget(self.bits_per_weight)

    def _check_budget(self, bits: float) -> None:
        least, most = (4.25, 8.5) if self.symmetric is False else (4.125, 8.25)
        if not least <= bits <= most:
            raise UsageError(
                f"--bits-per-weight {bits:g} is not possible; blocks take {least:g} to {most:g}"
            )
        if self.block_size is not None:
            raise UsageError(
                f"--bits-per-weight chooses blocks itself; leave --block-size {self.block_size} out"
            )
        if not self.calibrate:
            raise UsageError("--bits-per-weight is spent by measurement; add --calibrate")


DEFAULT_QUANTIZATION = Quantization()


def choose_formats(
    source: Formats, config: ModelConfig, weights: WeightsChoice, quantization: Quantization
) -> dict[str, WeightFormat]:
    """The format to store each weight in, by name as in `source`.

    Raises UsageError if the choices contradict each other or the model.
    """
    choices: dict[str, WeightsChoice] = {
        EMBEDDING: quantization.embedding or _table_default(weights),
        LM_HEAD: quantization.lm_head or _table_default(weights),
    }
    if config.tie_embeddings:
        shared = _shared_table(choices[EMBEDDING], quantization)
        choices[EMBEDDING] = choices[LM_HEAD] = shared
    if choices[EMBEDDING] == "w8a8":
        raise UsageError(
            "an embedding is looked up, not multiplied, so it cannot be w8a8; "
            "give --embedding source, int8 or int4"
        )
    _check_used(weights, quantization, list(choices.values()))
    shapes = weight_shapes(config)
    if weights == "w8a8":
        choices |= dict.fromkeys(_beside_w8a8(config.num_layers), "blocks")
    return {
        name: _format(choices.get(name, weights), fmt, quantization)
        # Norms and biases are few, and computed in float32 whatever they are stored in.
        if len(shapes[name]) == 2
        else fmt
        for name, fmt in source.items()
    }


def _beside_w8a8(layers: int) -> frozenset[str]:
    """Names of the matrices that stay in blocks where the others are multiplied as integers."""
    end = max(1, round(layers * _SHARE_IN_BLOCKS))
    chosen = {*range(layers)[:end], *range(layers)[-end:]}
    return frozenset(layer_name(layer, _IN_BLOCKS) for layer in chosen)


def _table_default(weights: WeightsChoice) -> WeightsChoice:
    """What the embedding and the head are stored in where nothing else is asked for.

    A table is looked up, and the head has few rows, which cost bytes more than products: beside
    w8a8 both stay in blocks.
    """
    return "blocks" if weights == "w8a8" else weights


def _shared_table(weights: WeightsChoice, quantization: Quantization) -> WeightsChoice:
    given = {quantization.embedding, quantization.lm_head} - {None}
    if len(given) > 1:
        raise UsageError(
            f"--embedding {quantization.embedding} and --lm-head {quantization.lm_head} contradict "
            "each other: this model has one table for both; give one of the two"
        )
    return quantization.embedding or quantization.lm_head or weights


def _check_used(
    weights: WeightsChoice, quantization: Quantization, others: list[WeightsChoice]
) -> None:
    if quantization.bits_per_weight is not None and weights != "int4":
        raise UsageError("--bits-per-weight has no effect without --weights int4; add that")
    if {weights, *others}.intersection(_ROUNDED):
        return
    unused = []
    if quantization.block_size is not None:
        unused.append(f"--block-size {quantization.block_size}")
    if quantization.symmetric is not None:
        unused.append("--symmetric" if quantization.symmetric else "--asymmetric")
    if quantization.calibrate:
        unused.append("--calibrate")
    if unused:
        raise UsageError(
            f"{unused[0]} has no effect on weights that are not rounded; "
            "add --weights int8 or int4, or leave it out"
        )


def _format(
    choice: WeightsChoice, source: WeightFormat, quantization: Quantization
) -> WeightFormat:
    if choice == "source":
        return source
    if choice == "blocks" and source.blocked and not source.affine:
        return source
    if choice == "float32":
        return FLOAT32
    if choice == "w8a8":
        return W8A8
    block_size = quantization.block_size or DEFAULT_BLOCK_SIZE
    dtype: Literal["int4", "int8"] = "int4" if choice == "int4" else "int8"
    return WeightFormat(dtype, block_size, affine=quantization.symmetric is False)


def rounded_from(source: Formats, *stored: Formats) -> list[str]:
    """The precisions of those source weights that are stored rounded, sorted."""
    return sorted(
        {
            str(fmt)
            for name, fmt in source.items()
            for other in {formats[name] for formats in stored} - {fmt}
            if other.blocked or other.w8a8
        }
    )
