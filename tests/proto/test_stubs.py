"""The committed stubs are those of the committed .proto files."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROTOS = ("ortolan/v1/ortolan", "inference/v2/grpc_predict_v2")


@pytest.mark.parametrize("proto", PROTOS)
def test_stubs_were_generated_from_this_proto_file(root: Path, proto: str) -> None:
    """A stale stub speaks another protocol than the page that documents it; run `make proto`."""
    file = root / "proto" / f"{proto}.proto"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (file.parent / "generated_from.txt").read_text().strip() == digest


@pytest.mark.parametrize("proto", PROTOS)
def test_stubs_are_what_the_compiler_writes(root: Path, proto: str, tmp_path: Path) -> None:
    """Nobody edits them by hand, so the next generation changes nothing else."""
    python = _compilers_python(root)
    subprocess.run(
        [
            *(python, "-m", "grpc_tools.protoc", "-I", "ortolan/proto=proto"),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")),
            f"ortolan/proto/{proto}.proto",
        ],
        cwd=root,
        check=True,
    )
    for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
        committed = root / "proto" / f"{proto}{suffix}"
        generated = tmp_path / "ortolan" / "proto" / f"{proto}{suffix}"
        assert committed.read_text() == generated.read_text(), committed.name


def _compilers_python(root: Path) -> str:
    """grpcio-tools wants another protobuf than we run with, so it has a place of its own."""
    own = root / "build" / "proto-venv" / "bin" / "python"
    if own.exists():
        return str(own)
    if find_spec("grpc_tools") is not None:
        return sys.executable
    pytest.skip("grpcio-tools is not installed; `make proto` installs it into build/proto-venv")
