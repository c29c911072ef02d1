"""GGUF's quantized types through ONNX Runtime, against the same file read by the gguf package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exact_bundle import ExactBundle
from gguf import GGMLQuantizationType as GgmlType
from reference_llama import ReferenceLlama
from tiny_llama import Shape, write_tiny_gguf

from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.gguf_blocks import BLOCK_FORMATS

IDS = [2, 299, 7, 7, 120, 45, 0, 200, 31, 288, 5, 64]
BLOCKED = [
    kind
    for kind, block in BLOCK_FORMATS.items()
    if block.format.blocked and kind != GgmlType.Q1_0  # which the package does not dequantize
]
# Wide enough for blocks of 256.
SHAPE = Shape(layers=1, hidden=256, heads=8, kv_heads=2, head_dim=32, inner=256)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_every_type_computes_the_reference_logits(tmp_path: Path, kind: GgmlType) -> None:
    """As projections, and as an embedding that is the output head too."""
    source = write_tiny_gguf(tmp_path / "model.gguf", types=kind.name, shape=SHAPE)
    export_bundle(str(source), tmp_path / "bundle", ExportOptions())
    expected = ReferenceLlama(source).logits(IDS)
    bundle = ExactBundle(tmp_path / "bundle")
    assert relative_error(bundle.prefill(IDS[:-1]), expected[:-1]) < 1e-4
    assert relative_error(bundle.decode(IDS[-1]), expected[-1:]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_every_type_computes_them_in_a_head_of_its_own(tmp_path: Path, kind: GgmlType) -> None:
    """A head that is not the embedding takes the way of the projections."""
    types = {"output.weight": kind.name}
    source = write_tiny_gguf(tmp_path / "model.gguf", types=types, tied=False, shape=SHAPE)
    export_bundle(str(source), tmp_path / "bundle", ExportOptions())
    expected = ReferenceLlama(source).logits(IDS)
    assert relative_error(ExactBundle(tmp_path / "bundle").prefill(IDS), expected) < 1e-4
