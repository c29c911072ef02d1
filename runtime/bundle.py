"""A bundle's folder, opened and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import BundleError
from ortolan.graphs.contract import GRAPH_NAMES
from ortolan.graphs.manifest import WEIGHTS_NAME, FileEntry, Manifest, file_entry

# Files up to this size are hashed whenever a bundle opens; the weights only when they are packed,
# and by `ortolan verify`.
_SMALL_BYTES = 16 << 20


@dataclass(frozen=True)
class Bundle:
    """A folder whose manifest, sizes and small files are as they were written."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """Raises BundleError naming the file that is missing, damaged, or of another version."""
        try:
            folder = Path(path).absolute()  # the process may change its folder later
        except OSError as exc:
            raise BundleError(f"{path}: the current folder is gone ({exc.strerror})") from exc
        manifest = Manifest.read(folder)
        bundle = cls(folder, manifest)
        for name in (*(f"{graph}.onnx" for graph in GRAPH_NAMES), WEIGHTS_NAME):
            if name not in manifest.files:
                raise BundleError(f"{folder}: manifest.json does not list {name}; export again")
        for name, entry in manifest.files.items():
            bundle._check_size(name, entry)
            if entry.size <= _SMALL_BYTES:
                bundle.check_hash(name)
        return bundle

    def file(self, name: str) -> Path:
        return self.path / name

    def graph_path(self, graph: str) -> Path:
        return self.file(f"{graph}.onnx")

    def check_hash(self, name: str) -> None:
        """Raises BundleError if the file's SHA-256 is not the manifest's."""
        expected = self.manifest.files[name]
        try:
            found = file_entry(self.file(name))
        except OSError as exc:
            raise BundleError(f"{self.file(name)}: cannot be read ({exc.strerror})") from exc
        if found != expected:
            raise BundleError(
                f"{self.file(name)}: damaged: SHA-256 is {found.sha256[:16]}..., manifest.json "
                f"says {expected.sha256[:16]}...; export the bundle again"
            )

    def _check_size(self, name: str, entry: FileEntry) -> None:
        path = self.file(name)
        if Path(name).name != name:
            raise BundleError(
                f"{self.path}: manifest.json lists {name!r}, which is not a file name"
            )
        try:
            size = path.stat().st_size
        except OSError:
            raise BundleError(f"{path}: missing from the bundle; export the bundle again") from None
        if size != entry.size:
            raise BundleError(
                f"{path}: has {size:,} bytes, manifest.json says {entry.size:,}; "
                "the copy is incomplete or damaged, export the bundle again"
            )
