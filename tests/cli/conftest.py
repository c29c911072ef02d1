"""A model that says what it is told to, and ways to run the command line with it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import ortolan
from ortolan.cli.app import main
from ortolan.graphs.manifest import (
    GraphEntry,
    Manifest,
    ModelConfig,
    Source,
    TensorEntry,
    WeightGroup,
    file_entry,
)

FAKE_PROGRAM = Path(__file__).with_name("fake_program.py")

Run = Callable[..., Result]
RunFake = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def run() -> Run:
    """Runs the command line in this process."""

    def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)

    return invoke


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model in the place of what `ortolan.load` loads."""
    llm = runpy.run_path(str(FAKE_PROGRAM))["FakeLLM"]()
    monkeypatch.setattr(ortolan, "load", llm.load)
    return llm


@pytest.fixture
def run_fake() -> Iterator[RunFake]:
    """Starts the command line with a fake model in a process of its own.

    `env` is laid over the environment; None removes a variable. FAKE_PIECES and FAKE_DELAY_S
    say how long an answer is, FAKE_CONTEXT the most messages that fit. Standard streams are
    pipes unless given.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(
        *args: str | Path, env: Mapping[str, str | None] | None = None, **streams: Any
    ) -> subprocess.Popen[bytes]:
        merged: dict[str, str | None] = {**os.environ, **(env or {})}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(
            [sys.executable, FAKE_PROGRAM, *args],
            env={name: value for name, value in merged.items() if value is not None},
            **{**pipes, **streams},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        with process:  # closes the pipes and waits
            pass


@pytest.fixture
def tiny_bundle(tmp_path: Path) -> Path:
    """A folder with a manifest that is right about its two files; no model could run from it."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(1000))
    (folder / "decode.onnx").write_bytes(b"not a graph")
    kv = [
        TensorEntry(f"past_key_values.{layer}.{part}", "float32", ["batch", 1, "capacity", 4])
        for layer in range(3)
        for part in ("key", "value")
    ]
    manifest = Manifest(
        schema_version="1.0",
        ortolan_version="0.0",
        model=ModelConfig("llama", 8, 4, 8, 3, 1, 1, 4, 1e-5, 1e4, 64, tie_embeddings=True),
        attention="gqa",
        graphs={
            "decode": GraphEntry(
                "decode.onnx", [TensorEntry("input_ids", "int64", ["batch", 1]), *kv], []
            )
        },
        weights=[
            WeightGroup("embedding", "int8 block 32", 1, 800, 900),
            WeightGroup("norm", "float32", 1, 15, 60),
            WeightGroup("mlp", "int8 block 32", 1, 36, 40),
        ],
        files={name: file_entry(folder / name) for name in ("weights.bin", "decode.onnx")},
        source=Source("tiny.gguf", "gguf", "ab" * 32),
    )
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder
