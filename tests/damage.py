"""For fuzzing checkpoints: bits to flip, a bound on memory, and an export that is judged."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from ortolan.errors import CheckpointError, UsageError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.graphs.manifest import Manifest

MEMORY_MARGIN_BYTES = 1 << 30

place = st.floats(0, 1, exclude_max=True)  # where in the bytes, as a part of their length
flip = st.tuples(place, st.integers(0, 7))


def flipped(data: bytes, flips: list[tuple[float, int]], length: int) -> bytes:
    """The data with bits changed in its first `length` bytes."""
    changed = bytearray(data)
    for place, bit in flips:
        changed[int(place * length)] ^= 1 << bit
    return bytes(changed)


@contextlib.contextmanager
def memory_bounded() -> Iterator[None]:
    """An allocation of more than a gigabyte is a MemoryError, and so a failure."""
    resource = pytest.importorskip("resource")
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs Linux's /proc to know how much memory is mapped")
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_MARGIN_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def tried_export(
    write: Callable[[Path], Path],
    refusals: tuple[type[Exception], ...] = (CheckpointError, UsageError),
) -> Manifest | str:
    """The refusal's message, or what a whole bundle says; anything else fails the test.

    write: puts the checkpoint into a folder, and returns what to export.
    """
    folder = Path(tempfile.mkdtemp())
    try:
        target = folder / "out" / "bundle"
        target.parent.mkdir()
        source = write(folder)
        try:
            export_bundle(str(source), target, ExportOptions())
        except refusals as refusal:
            assert list(target.parent.iterdir()) == []
            message = str(refusal)
            assert len(message) < 1000
            assert message.isprintable(), "a file's bytes must not reach the terminal raw"
            return message
        assert list(target.parent.iterdir()) == [target]
        manifest = Manifest.read(target)
        for name, entry in manifest.files.items():
            assert (target / name).stat().st_size == entry.size
        return manifest
    finally:
        shutil.rmtree(folder)
