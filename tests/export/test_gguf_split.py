"""A GGUF model in several files: whole from any of them, or refused by the name of what lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import llama_cpp_convert as llama_cpp
import pytest
from tiny_llama import Shape, random_tensors, settings, write_tiny_gguf

from ortolan.errors import CheckpointError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.gguf_reader import GgufCheckpoint
from ortolan.graphs.manifest import Manifest


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The tiny model in files of at most eight tensors."""
    tensors = random_tensors(Shape(), tied=True, seed=0)
    folder = tmp_path / "parts"
    folder.mkdir()
    llama_cpp.write(folder / "tiny.gguf", "llama", settings(Shape()), tensors, split_max_tensors=8)
    found = sorted(folder.iterdir())
    assert [path.name for path in found] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_whole_model(parts: list[Path], tmp_path: Path, opened: int) -> None:
    """Shells complete to whichever file comes first; the weights must be all there."""
    whole = write_tiny_gguf(tmp_path / "whole.gguf")
    manifests = []
    for source, name in ((parts[opened], "split"), (whole, "one")):
        export_bundle(str(source), tmp_path / name, ExportOptions())
        manifests.append(Manifest.read(tmp_path / name))
    split, one = manifests
    assert split.files["weights.bin"] == one.files["weights.bin"]
    assert split.files["tokenizer.json"] == one.files["tokenizer.json"]
    assert split.model == one.model
    assert GgufCheckpoint(parts[opened]).files == parts


def test_the_hash_of_the_source_covers_every_part(parts: list[Path], tmp_path: Path) -> None:
    """It names the weights, whichever part was opened."""
    hashes = set()
    for index in (0, 2):
        target = tmp_path / f"bundle-{index}"
        hashes.add(export_bundle(str(parts[index]), target, ExportOptions()).source.sha256)
    assert len(hashes) == 1
    data = bytearray(parts[1].read_bytes())
    data[-20] ^= 1
    parts[1].write_bytes(data)
    hashes.add(export_bundle(str(parts[0]), tmp_path / "bundle", ExportOptions()).source.sha256)
    assert len(hashes) == 2


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Path], missing: int) -> None:
    """One of many downloads failed; which one is what its owner needs to know."""
    parts[missing].unlink()
    opened = parts[(missing + 1) % 3]
    with pytest.raises(CheckpointError, match=rf"{parts[missing].name}: is missing"):
        GgufCheckpoint(opened)


def test_a_part_under_the_name_of_another_is_refused(parts: list[Path]) -> None:
    """Tensors would be there twice, or not at all."""
    shutil.copy(parts[1], parts[2])
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf: its name says part 3 of 3"):
        GgufCheckpoint(parts[0])


def test_a_part_of_another_model_is_refused(parts: list[Path]) -> None:
    """The same names and counts, but not these tensors."""
    shutil.copy(parts[2], parts[1])
    data = parts[1].read_bytes()
    at = data.index(b"split.no") + len(b"split.no") + 4
    parts[1].write_bytes(data[:at] + bytes([1]) + data[at + 1 :])
    with pytest.raises(CheckpointError, match=r"in an earlier file too|is missing|belong together"):
        GgufCheckpoint(parts[0])


def test_a_renamed_part_says_what_its_name_must_be(parts: list[Path]) -> None:
    """Without the number in its name, the others cannot be found."""
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(CheckpointError, match=r"NAME-00001-of-00003\.gguf"):
        GgufCheckpoint(renamed)
