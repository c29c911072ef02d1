"""Sizes of packed weights, against the files that ONNX Runtime writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from ortolan.graphs.manifest import Manifest
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.accuracy import Accuracy
from ortolan.runtime.engine.packed import is_packed, packed_graphs
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.providers import find_provider
from ortolan.runtime.weight_sizes import weight_sizes

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", {"*": "Q4_1", "token_embd*": "Q8_0"}]


def exported(folder: Path, tied: bool, types: Any) -> Path:
    """A bundle wide enough that weights outweigh what files are padded with."""
    from tiny_llama import Shape, write_tiny_gguf

    from ortolan.export.exporter import ExportOptions, export_bundle

    shape = Shape(hidden=256, inner=512, heads=4, kv_heads=2, head_dim=64)
    file = write_tiny_gguf(folder / "m.gguf", types=types, tied=tied, shape=shape)
    export_bundle(str(file), folder / "bundle", ExportOptions())
    return folder / "bundle"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_packed_file_has_the_size_that_was_said(tmp_path: Path, types: Any, tied: bool) -> None:
    """Whoever plans a disk, or a container's memory, plans with this."""
    bundle = Bundle.open(exported(tmp_path, tied, types))
    provider = find_provider("cpu", ort)
    use_threads(None)
    accuracies: tuple[Accuracy, ...] = ("default", "exact")
    for accuracy in accuracies:
        cache = tmp_path / accuracy
        assert not is_packed(bundle, provider, accuracy, str(cache))
        packed_graphs(bundle, provider, accuracy, str(cache))
        assert is_packed(bundle, provider, accuracy, str(cache))
        (file,) = cache.rglob("weights.packed")
        sizes = weight_sizes(bundle.manifest, accuracy)
        assert sizes.file == pytest.approx(file.stat().st_size, rel=0.03), accuracy
        assert 0 < sizes.used <= sizes.file


def test_format_of_a_later_version_is_estimated(tiny_bundle: Path) -> None:
    """A newer minor of the manifest is readable; its formats must not end in a traceback."""
    manifest = Manifest.read(tiny_bundle)
    groups = [dataclasses.replace(group, precision="int3 zigzag") for group in manifest.weights]
    sizes = weight_sizes(dataclasses.replace(manifest, weights=groups), "default")
    assert sizes.used >= sum(group.bytes for group in groups)
