"""Bytes of a bundle's weights as ONNX Runtime packs them, from what the manifest says of them.

The sizes are those of version 1.32 on x86-64, read from packed files; tests compare them with the
files that it writes. On other processors products are packed otherwise, to about the same size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ortolan.graphs.manifest import Manifest, ModelConfig, WeightGroup
from ortolan.runtime.engine.accuracy import Accuracy

_PRECISION = re.compile(r"(float|bfloat|int)(\d+)( block \d+)?( \+ offsets)?")


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of the packed form.

    file: all of it, with the unpacked form of what is packed, which nobody reads.
    used: what both sessions together map and read.
    unpacked: the largest matrix that is computed with in float32 at every call; 0 if none is.
    """

    file: int
    used: int
    unpacked: int = 0

    def __add__(self, other: WeightSizes) -> WeightSizes:
        return WeightSizes(
            self.file + other.file, self.used + other.used, max(self.unpacked, other.unpacked)
        )


def weight_sizes(manifest: Manifest, accuracy: Accuracy) -> WeightSizes:
    """Sizes of all weights of a bundle."""
    total = WeightSizes(0, 0)
    for group in manifest.weights:
        total += _group_sizes(group, manifest, accuracy)
    return total


def _group_sizes(group: WeightGroup, manifest: Manifest, accuracy: Accuracy) -> WeightSizes:
    if group.role in ("norm", "rotary"):
        return WeightSizes(group.bytes, group.bytes)
    config = manifest.model
    if group.role != "embedding":
        return _product(group, accuracy, _largest(config, group.role))
    table = WeightSizes(group.bytes, group.bytes)
    if not config.tie_embeddings:
        return table
    head = _product(group, accuracy, group.elements)
    if manifest.attention == "onnx" and _is_blocked(group.precision):
        # The standard has no product with a table stored row by row: it is expanded every time.
        return table + WeightSizes(0, 0, group.elements * 4)
    # The packed file holds a blocked table's codes twice, in the two shapes that the graphs give
    # them, its scales and offsets once.
    codes = group.elements * _bits(group.precision) // 8
    shared = group.bytes - codes if _is_blocked(group.precision) else 0
    if group.precision == "float32":
        shared = group.bytes
    scales = _scale_bytes(group)
    return table + WeightSizes(head.file - shared, head.used - scales, head.unpacked)


def _product(group: WeightGroup, accuracy: Accuracy, largest: int) -> WeightSizes:
    """Sizes of matrices that are multiplied with. largest: elements of the largest of them."""
    found = _PRECISION.fullmatch(group.precision)
    if found is None:  # a format of another version: assume that it is packed to its own size
        return WeightSizes(2 * group.bytes, group.bytes)
    _, bits, block, affine = found.groups()
    if block is None:  # float weights are expanded before they are packed
        floats = group.elements * 4 + max(group.bytes - group.elements * int(bits) // 8, 0)
        return WeightSizes(2 * floats, floats)
    codes = group.elements * int(bits) // 8
    scales = _scale_bytes(group)
    offsets = group.bytes - codes - scales if affine else 0
    if accuracy == "default":
        # Codes, scales, and each block's sum of codes, for activations that are rounded too.
        packed = codes + 2 * scales
    elif bits == "4":
        packed = codes
    else:  # nothing is packed: the matrix is expanded at every call
        return WeightSizes(group.bytes + offsets, group.bytes, largest * 4)
    return WeightSizes(group.bytes + packed + offsets, packed + scales + offsets)


def _scale_bytes(group: WeightGroup) -> int:
    """Of blocked weights: what there is beside codes, of which offsets are one half."""
    if not _is_blocked(group.precision):
        return 0
    beside = group.bytes - group.elements * _bits(group.precision) // 8
    return beside // 2 if group.precision.endswith("offsets") else beside


def _is_blocked(precision: str) -> bool:
    return " block " in precision


def _bits(precision: str) -> int:
    found = _PRECISION.fullmatch(precision)
    return int(found[2]) if found else 8


def _largest(config: ModelConfig, role: str) -> int:
    """Elements of the largest matrix of that role, projections stored as one counting as one."""
    if role == "head":
        return config.hidden_size * config.vocab_size
    if role == "mlp":
        return config.hidden_size * 2 * config.intermediate_size
    heads = config.num_heads + 2 * config.num_kv_heads
    return config.hidden_size * heads * config.head_dim
