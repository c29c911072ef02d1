"""Weights expanded to float32 slab by slab: the same values, without holding a whole matrix."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes  # noqa: F401  (gives numpy bfloat16)
import numpy as np
import pytest
from tiny_hf import config, write_folder

from ortolan.export import weights_file, write_weights
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.weights import Weight, stack_rows
from ortolan.export.write_weights import float_columns, float_rows
from ortolan.graphs.formats import FLOAT32, WeightFormat

MB = 1 << 20


def bfloat16(rows: int, inputs: int) -> Weight:
    values = np.random.default_rng(rows).standard_normal((rows, inputs)).astype("bfloat16")
    return Weight(WeightFormat("bfloat16"), values)


def int4(rows: int, inputs: int, block: int) -> Weight:
    rng = np.random.default_rng(rows)
    shape = rows, -(-inputs // block)
    scale, offset = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    codes = rng.integers(-8, 8, (rows, inputs), dtype=np.int8)
    return Weight(WeightFormat("int4", block, affine=True), codes, scale, offset)


@pytest.mark.parametrize("slab_bytes", [1, 4 * 32 * 20, 1 << 24])
@pytest.mark.parametrize(
    "parts",
    [
        [bfloat16(8, 90)],
        [bfloat16(8, 90), bfloat16(5, 90)],
        # The last block is shorter, and blocks of several sizes stand side by side.
        [int4(8, 90, 16), int4(5, 90, 32), bfloat16(7, 90)],
    ],
    ids=["single", "joined", "mixed"],
)
def test_slabs_are_the_whole_matrix(
    monkeypatch: pytest.MonkeyPatch, parts: list[Weight], slab_bytes: int
) -> None:
    """A slab that begins inside a block would take its neighbour's scale."""
    monkeypatch.setattr(write_weights, "SLAB_BYTES", slab_bytes)
    expected = stack_rows([part.as_float32() for part in parts]).codes
    slabs = list(float_columns(parts, FLOAT32))
    np.testing.assert_array_equal(np.concatenate(slabs), expected.T)
    for part in parts:
        rows = np.concatenate(list(float_rows(part, FLOAT32)))
        np.testing.assert_array_equal(rows, part.dequantized())
    assert (len(slabs) > 1) == (slab_bytes < 1 << 24)


def test_expanding_joined_projections_takes_less_than_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 16-bit checkpoint that just fits must not need three times its largest matrix."""
    for module in (write_weights, weights_file):
        monkeypatch.setattr(module, "SLAB_BYTES", MB)
    hidden, inner, vocab = 512, 8192, 16384
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab}
    source = write_folder(
        tmp_path / "model", config(**sizes, num_hidden_layers=1), dtype="bfloat16"
    )
    tracemalloc.start()  # what is mapped from the source is not counted
    try:
        export_bundle(str(source), tmp_path / "bundle", ExportOptions(weights="float32"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "bundle" / "weights.bin").stat().st_size > 4 * hidden * (2 * inner + vocab)
    assert peak < 4 * hidden * inner
