"""What `--weights`, `--lm-head`, `--embedding` and blocks store, and that it computes right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exact_bundle import ExactBundle
from reference_llama import ReferenceLlama
from tiny_hf import write_folder
from tiny_llama import Shape, write_tiny_gguf

from ortolan.errors import UsageError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.precision import Quantization
from ortolan.export.quantize import quantize
from ortolan.export.weights import Weight
from ortolan.graphs.formats import FLOAT32, WeightFormat
from ortolan.graphs.manifest import Manifest

# Neither the width nor the MLP's is a multiple of any block's size.
ODD = Shape(hidden=72, inner=100)
IDS = [5, 17, 250, 3, 99, 42, 8, 130, 7]


@pytest.mark.parametrize("attention", ["gqa", "onnx"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("weights", "block_size"), [("int4", 32), ("int8", 16), ("int4", 128)])
def test_odd_widths_compute_what_the_rounded_weights_say(
    tmp_path: Path, weights: str, block_size: int, symmetric: bool, tied: bool, attention: str
) -> None:
    """A last block that is cut short, in products, block sums and the table, must count right."""
    source = write_tiny_gguf(tmp_path / "odd.gguf", shape=ODD, tied=tied)
    reference = ReferenceLlama(source)
    fmt = WeightFormat(weights, block_size, affine=not symmetric)
    for name, values in reference.weights.items():
        if values.ndim == 2:
            rounded = quantize(Weight(FLOAT32, values.astype(np.float32)), fmt)
            reference.weights[name] = rounded.dequantized().astype(np.float64)
    options = ExportOptions(
        weights, quantization=Quantization(block_size, symmetric), attention=attention
    )
    manifest = export_bundle(str(source), tmp_path / "bundle", options)
    expected = reference.logits(IDS)
    found = ExactBundle(tmp_path / "bundle").prefill(IDS)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert {group.precision for group in manifest.weights} == {str(fmt), "float32"}
    assert manifest.rounded_from == ["float32"]


def precisions(manifest: Manifest) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for group in manifest.weights:
        found.setdefault(group.role, set()).add(group.precision)
    return found


def test_head_and_embedding_have_formats_of_their_own(tmp_path: Path) -> None:
    """The two ends of a model suffer most from few bits, and weigh most in a small one."""
    source = write_tiny_gguf(tmp_path / "m.gguf", types="F16", tied=False)
    quantization = Quantization(64, lm_head="int8", embedding="source")
    manifest = export_bundle(
        str(source), tmp_path / "bundle", ExportOptions("int4", quantization=quantization)
    )
    found = precisions(manifest)
    assert found["embedding"] == {"float16"}
    assert found["head"] == {"int8 block 64"}
    assert found["attention"] == found["mlp"] == {"int4 block 64"}


@pytest.mark.parametrize("option", ["lm_head", "embedding"])
def test_shared_table_follows_either_option(tmp_path: Path, option: str) -> None:
    """There is one table, whichever of its two names is used."""
    source = write_tiny_gguf(tmp_path / "m.gguf")
    quantization = Quantization(**{option: "int8"})
    manifest = export_bundle(
        str(source), tmp_path / "bundle", ExportOptions("source", quantization=quantization)
    )
    assert precisions(manifest)["embedding"] == {"int8 block 32"}
    assert precisions(manifest)["mlp"] == {"float32"}


@pytest.mark.parametrize(
    ("weights", "settings", "said"),
    [
        ("int4", {"embedding": "int8", "lm_head": "source"}, "one table"),
        ("source", {"block_size": 64}, "--block-size 64"),
        ("float32", {"symmetric": False}, "--asymmetric"),
        ("int8", {"block_size": 48}, "--block-size 48"),
        ("int8", {"block_size": 512}, "--block-size 512"),
        ("int8", {"block_size": 8}, "--block-size 8"),
    ],
)
def test_choices_that_cannot_be_are_refused(
    tmp_path: Path, weights: str, settings: dict[str, object], said: str
) -> None:
    """An option without effect is a misunderstanding; nothing is written."""
    source = write_tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match=said):
        export_bundle(
            str(source),
            tmp_path / "bundle",
            ExportOptions(weights, quantization=Quantization(**settings)),
        )
    assert not (tmp_path / "bundle").exists()


def test_format_that_the_source_has_already_is_kept_exactly(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    """Asking for what is there must not round it once more."""
    options = ExportOptions("int4", quantization=Quantization(32, False, embedding="source"))
    manifest = export_bundle(str(tiny_gguf), tmp_path / "bundle", options)
    assert manifest.rounded_from == []
    assert (
        export_bundle(str(tiny_gguf), tmp_path / "as-is", ExportOptions()).files == manifest.files
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_floats_are_kept_or_rounded_once(tmp_path: Path, dtype: str) -> None:
    """`--weights source` takes no more room than the checkpoint; int8 reads the same values."""
    source = write_folder(tmp_path / "folder", dtype=dtype)
    kept = export_bundle(str(source), tmp_path / "kept", ExportOptions())
    assert {group.precision for group in kept.weights} == {dtype, "float32"}
    assert kept.rounded_from == []
    rounded = export_bundle(str(source), tmp_path / "rounded", ExportOptions("int8"))
    assert rounded.rounded_from == [dtype]
    ours, theirs = (ExactBundle(tmp_path / name).prefill(IDS) for name in ("rounded", "kept"))
    assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()
