"""A damaged bundle is found when it opens, and the sentence names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortolan.errors import BundleError
from ortolan.graphs.manifest import Manifest
from ortolan.runtime.bundle import Bundle


@pytest.fixture
def bundle(smollm2_bundle: Path, tmp_path: Path) -> Path:
    """A bundle to break: small files are copies, the weights a link."""
    copy = tmp_path / "bundle"
    copy.mkdir()
    for file in smollm2_bundle.iterdir():
        if file.name == "weights.bin":
            os.link(file, copy / file.name)
        elif file.is_file():
            shutil.copy(file, copy / file.name)
    return copy


def change_manifest(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_whole_bundle_opens(bundle: Path) -> None:
    assert Bundle.open(bundle).manifest.model.num_layers == 30


def test_manifest_comes_back_as_it_was_written(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    (bundle / "manifest.json").write_text(manifest.to_json())
    assert Manifest.read(bundle) == manifest


@pytest.mark.parametrize("name", ["decode.onnx", "sample.onnx", "tokenizer.json"])
def test_flipped_byte_is_found(bundle: Path, name: str) -> None:
    """A graph that differs by a bit may run and compute something else."""
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / name).write_bytes(data)
    with pytest.raises(BundleError, match=rf"{name}: damaged.*export the bundle again"):
        Bundle.open(bundle)


def test_flipped_byte_in_the_weights_is_found_by_its_hash(bundle: Path) -> None:
    data = bytearray((bundle / "weights.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "weights.bin").unlink()
    (bundle / "weights.bin").write_bytes(data)
    with pytest.raises(BundleError, match=r"weights\.bin: damaged"):
        Bundle.open(bundle).check_hash("weights.bin")


@pytest.mark.parametrize("name", ["decode.onnx", "weights.bin", "tokenizer.json"])
def test_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=f"{name}: missing from the bundle"):
        Bundle.open(bundle)


def test_truncated_weights_are_found_without_reading_them(bundle: Path) -> None:
    (bundle / "weights.bin").unlink()
    (bundle / "weights.bin").write_bytes(b"short")
    with pytest.raises(BundleError, match=r"weights\.bin: has 5 bytes, manifest\.json says"):
        Bundle.open(bundle)


def test_newer_major_schema_is_refused_with_the_remedy(bundle: Path) -> None:
    change_manifest(bundle, lambda content: content.update(schema_version="2.0"))
    with pytest.raises(BundleError, match=r"schema 2\.0 .*update Ortolan, or export"):
        Bundle.open(bundle)


def test_newer_minor_schema_is_readable(bundle: Path) -> None:
    """The promise: a minor version only adds."""

    def newer(content: dict[str, Any]) -> None:
        content.update(schema_version="1.9", something_new={"a": 1})
        content["model"]["something_new"] = True

    change_manifest(bundle, newer)
    assert Bundle.open(bundle).manifest.schema_version == "1.9"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("model"), "model is missing"),
        (lambda c: c["model"].pop("head_dim"), r"model\.head_dim is missing"),
        (lambda c: c["model"].update(head_dim="64"), r"model\.head_dim is '64'"),
        (lambda c: c.update(files=[]), r"files is \[\]"),
        (lambda c: c["files"].pop("weights.bin"), r"does not list weights\.bin"),
        (lambda c: c.update(schema_version=None), "schema_version is None"),
        (lambda c: c["files"].update({"../x": {"size": 1, "sha256": ""}}), "not a file name"),
    ],
)
def test_broken_manifest_is_explained(
    bundle: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    change_manifest(bundle, change)
    with pytest.raises(BundleError, match=said):
        Bundle.open(bundle)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_manifest_that_is_no_manifest_is_explained(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Bundle.open(bundle)


def test_folder_that_is_no_bundle_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"not a bundle.*ortolan export"):
        Bundle.open(tmp_path)
    with pytest.raises(BundleError, match=r"no such folder.*ortolan export"):
        Bundle.open(tmp_path / "nothing")
