"""What benchmarks count and read when they compare with other programs."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import _bandwidth
import _gguf_bytes
import _ours
import numpy as np
import pytest
from _gguf_folder import write_folder
from _other_python import OtherPython
from _random_llama import SHAPES
from make_checkpoint import make

import ortolan
from ortolan.errors import BenchError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.precision import Quantization

IDS = list(range(3, 40))


def test_folder_made_of_a_gguf_file_is_the_same_model(tiny_gguf: Path, tmp_path: Path) -> None:
    """A peer that only reads folders would otherwise be compared on another model."""
    write_folder(tiny_gguf, tmp_path / "folder")
    found = []
    for name, source in (("a", tmp_path / "folder"), ("b", tiny_gguf)):
        export_bundle(str(source), tmp_path / name, ExportOptions(weights="float32"))
        found.append(ortolan.load(tmp_path / name, max_slots=1))
    np.testing.assert_array_equal(found[0].logits(IDS), found[1].logits(IDS))
    assert found[0].encode("the end") == found[1].encode("the end")


def test_bytes_per_token_count_a_tied_table_once_and_no_lookups(tmp_path: Path) -> None:
    """The share of the bandwidth that decode reaches rests on this number."""
    make(tmp_path / "folder", SHAPES["tiny"], "safetensors")
    make(tmp_path / "q8_0.gguf", SHAPES["tiny"], "gguf-q8_0")
    options = ExportOptions(weights="int8", quantization=Quantization(block_size=32))
    manifest = export_bundle(str(tmp_path / "folder"), tmp_path / "bundle", options)
    hidden, inner, kv, vocab = 64, 96, 32, 300
    matrices = vocab * hidden + 2 * (2 * hidden * hidden + 2 * kv * hidden + 3 * inner * hidden)
    norms = 5 * hidden * 4
    # A scale for each 32 codes: 4 bytes here, 2 in GGUF, which also has 8 rope factors.
    assert _bandwidth.bytes_per_token(manifest) == matrices * 36 // 32 + norms
    found = _gguf_bytes.bytes_per_token(tmp_path / "q8_0.gguf")
    assert found == matrices * 34 // 32 + norms + 8 * 4


def test_rows_are_shared_by_engines_beside_each_other(tiny_bundle: Path) -> None:
    """In a process of their own, which says why where there is nothing to measure."""
    tests = _ours.Tests(prompt=4, tokens=4, rows=5, row_prompt=6, row_tokens=7, repeats=1)
    command = ("ortolan", sys.executable, "_rows_beside.py")
    with closing(OtherPython(*command, [str(tiny_bundle), "2", "2"], tests)) as beside:
        assert all(beside.run()[0] > 0 for _ in range(2))
    with pytest.raises(BenchError, match="replicas is 3, and there are 2 threads"):
        OtherPython(*command, [str(tiny_bundle), "2", "3"], tests)
