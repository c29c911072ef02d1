"""Bundles of two small files, for tests of how a folder is published."""

from __future__ import annotations

from pathlib import Path

from ortolan.export.publish import published_folder

NAMES = ("manifest.json", "decode.onnx")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_bundle(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    (folder / "decode.onnx").write_text(text)


def publish_to(target: Path, text: str = "new", *, force: bool = False) -> None:
    with published_folder(target, force=force, replaceable=NAMES) as folder:
        write_bundle(folder, text)


def assert_only_old_is_left(old: Path) -> None:
    assert names(old.parent) == ["bundle"]
    assert names(old) == ["decode.onnx", "manifest.json"]
    assert {path.read_text() for path in old.iterdir()} == {"old"}
