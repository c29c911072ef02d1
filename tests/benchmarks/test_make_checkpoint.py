"""Random checkpoints: one set of weights in every format, in files that others can read."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import _random_llama
import gguf
import llama_cpp_convert
import ml_dtypes  # noqa: F401  (gives numpy bfloat16)
import numpy as np
import pytest
from _random_llama import SHAPES, Shape
from make_checkpoint import make
from safetensors.numpy import load_file

import ortolan
from ortolan.export.exporter import ExportOptions, export_bundle

TINY = SHAPES["tiny"]
IDS = list(range(3, 60, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "folder"
    make(path, TINY, "safetensors")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("random-gguf")
    paths = {kind: home / f"{kind}.gguf" for kind in ("bf16", "q8_0", "q4_0")}
    for kind, path in paths.items():
        make(path, TINY, f"gguf-{kind}")
    return paths


def stored(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a GGUF file in float32, by the gguf package."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


# Of a block's largest number: half a step of 255 or 15 and the float16 scale; Q4_0's codes end at
# 7 on one side, so that a number there may be a whole step off.
@pytest.mark.parametrize(("kind", "error"), [("bf16", 0.0), ("q8_0", 0.005), ("q4_0", 0.13)])
def test_gguf_holds_the_weights_of_the_folder(
    folder: Path, files: dict[str, Path], kind: str, error: float
) -> None:
    """Else two programs on two formats would not be compared on the same model."""
    _, wanted = llama_cpp_convert.convert(folder)
    found = stored(files[kind])
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        shape = values.shape if values.ndim == 1 else (-1, 32)
        blocks, got = values.reshape(shape), found[name].reshape(shape)
        allowed = 0.0 if values.ndim == 1 else error * np.abs(blocks).max(axis=-1, keepdims=True)
        np.testing.assert_array_less(np.abs(got - blocks), allowed + 1e-6 * np.abs(blocks) + 1e-9)


def test_gguf_says_what_the_converter_would(folder: Path, files: dict[str, Path]) -> None:
    """A setting that is missing or wrong would have llama.cpp compute another model."""
    wanted, _ = llama_cpp_convert.convert(folder)
    fields = gguf.GGUFReader(files["q4_0"]).fields
    for key, value in wanted.items():
        if not key.startswith("tokenizer."):
            assert fields[key].contents() == pytest.approx(value), key
    assert len(fields["tokenizer.ggml.tokens"].contents()) == TINY.vocab


def logits(source: Path, bundle: Path, weights: str) -> np.ndarray:
    options = ExportOptions(weights=weights)  # type: ignore[arg-type]
    export_bundle(str(source), bundle, options)
    llm = ortolan.load(bundle, accuracy="exact", max_slots=1)
    return np.asarray(llm.logits(IDS))


def test_every_format_exports_to_the_same_answers(
    folder: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """Rows put in the wrong order would pass every check of shapes and names."""
    wanted = logits(folder, tmp_path / "folder", "float32")
    assert np.isfinite(wanted).all()
    assert 0.1 < wanted.std() < 10
    for kind, error in (("bf16", 1e-4), ("q8_0", 0.03), ("q4_0", 0.5)):
        found = logits(files[kind], tmp_path / kind, "source")
        assert np.sqrt(np.mean((found - wanted) ** 2)) < error * wanted.std(), kind


def test_weights_depend_on_the_seed_and_the_name_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark of fewer layers, or one made by a later version, must mean the same weights."""
    monkeypatch.setattr(_random_llama, "PIECE", 1)  # other pieces, one layer, and one row at a time
    make(tmp_path / "again", replace(TINY, layers=1), "safetensors")
    make(tmp_path / "other", TINY, "safetensors", seed=1)
    first = load_file(folder / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert again.keys() < first.keys()
    for name, values in again.items():
        assert values.tobytes() == first[name].tobytes(), name
        assert values.tobytes() != other[name].tobytes(), name
    assert len({values.tobytes()[:64] for values in first.values()}) == len(first)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "tiny"])
def test_known_shapes_have_their_known_sizes(name: str) -> None:
    """A wrong width measures a model that nobody runs."""
    billions = {
        "llama-3.2-1b": 1.236,
        "llama-3.1-8b": 8.030,
        "tinyllama-1.1b": 1.100,
        "mistral-7b": 7.242,
    }
    shape: Shape = SHAPES[name]
    size = sum(tensor.size for tensor in _random_llama.tensors(shape, 0))
    assert size / 1e9 == pytest.approx(billions[name], abs=0.001)


def test_the_command_does_not_write_over_what_is_there(folder: Path, root: Path) -> None:
    """Gigabytes that took minutes may be someone's."""
    script = root / "benchmarks" / "make_checkpoint.py"
    done = subprocess.run(
        [sys.executable, str(script), "tiny", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "is there already" in done.stderr
