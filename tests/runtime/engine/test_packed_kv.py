"""Packed files of bundles with an int8 KV cache, whose decode graph has nodes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_llama import write_tiny_gguf

from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.runtime.engine.packed import optimized_graphs
from ortolan.runtime.params import EngineConfig


@pytest.mark.parametrize("types", ["Q4_1", "F16", "F32"])
@pytest.mark.parametrize("tied", [True, False])
def test_decode_and_prefill_share_one_packed_file(tmp_path: Path, types: str, tied: bool) -> None:
    """Two files would be twice the memory; constants folded from casts are named after nodes."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf", types=types, tied=tied)
    export_bundle(str(source), tmp_path / "bundle", ExportOptions(kv="int8"))
    paths = optimized_graphs(tmp_path / "bundle", EngineConfig())
    assert len({path.parent for path in paths.values()}) == 1
