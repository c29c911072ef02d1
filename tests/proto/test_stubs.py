"""The committed stubs are those of the committed .proto file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

STUBS = ("ortolan_pb2.py", "ortolan_pb2.pyi", "ortolan_pb2_grpc.py")


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "proto" / "ortolan" / "v1"


def test_stubs_were_generated_from_this_proto_file(folder: Path) -> None:
    """A stale stub speaks another protocol than the page that documents it; run `make proto`."""
    digest = hashlib.sha256((folder / "ortolan.proto").read_bytes()).hexdigest()
    assert (folder / "generated_from.txt").read_text().strip() == digest


def test_stubs_are_what_the_compiler_writes(root: Path, folder: Path, tmp_path: Path) -> None:
    """Nobody edits them by hand, so the next generation changes nothing else."""
    python = _compilers_python(root)
    subprocess.run(
        [
            *(python, "-m", "grpc_tools.protoc", "-I", "ortolan/proto=proto"),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")),
            "ortolan/proto/ortolan/v1/ortolan.proto",
        ],
        cwd=root,
        check=True,
    )
    generated = tmp_path / "ortolan" / "proto" / "ortolan" / "v1"
    for name in STUBS:
        assert (folder / name).read_text() == (generated / name).read_text(), name


def _compilers_python(root: Path) -> str:
    """grpcio-tools wants another protobuf than we run with, so it has a place of its own."""
    own = root / "build" / "proto-venv" / "bin" / "python"
    if own.exists():
        return str(own)
    if find_spec("grpc_tools") is not None:
        return sys.executable
    pytest.skip("grpcio-tools is not installed; `make proto` installs it into build/proto-venv")
