"""Ortolan against llama.cpp on the same GGUF file with the same number of threads.

Each round runs llama-bench and llama-batched-bench, then Ortolan (never two at once). Prefill:
tokens that were not seen before, to the first token of the answer. Decode: one row from an empty
context on; ours goes through LLM.stream, sampling (greedy) and detokenizing included, while
llama-bench does neither. Rows: steps of many rows, each after a prompt of its own; ours samples.
The bounds are for the published file: another one is compared and not judged.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import _ours
from _common import Report, Series, demo_checkpoint, parser
from _ours import Ours, Tests

import ortolan
from ortolan.bench.peers.llama_cpp import (
    BATCHED,
    BENCH,
    LlamaPrograms,
    parse_batched_bench,
    parse_llama_bench,
)
from ortolan.errors import BenchError


@dataclass(frozen=True)
class Bounds:
    """How many times as fast as llama.cpp each test has to be; None: not judged."""

    prefill: float | None
    decode: float | None
    rows: float | None


QUANTIZE = "llama-quantize"
KINDS = ("Q8_0", "Q4_0")  # that a file is made to
PUBLISHED_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PUBLISHED = Bounds(prefill=2.8, decode=1.0, rows=2.2)
OTHER = Bounds(None, None, None)


def source_file(given: Path | None, manifest: ortolan.Manifest) -> Path:
    """The GGUF file that the bundle was made from: given, or the demo checkpoint's."""
    given = given or demo_checkpoint()
    with given.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != manifest.source.sha256:
        raise BenchError(f"{given.name} is not the file that the bundle was exported from")
    return given


def requantized(programs: LlamaPrograms, gguf: Path, folder: Path, kind: str) -> Path:
    """The model in llama.cpp's format `kind` ("Q4_0"), with the head that llama-quantize gives it.

    `programs` has to know QUANTIZE.
    """
    file = folder / f"{kind}.gguf"
    programs.run(QUANTIZE, "--allow-requantize", gguf, file, kind)
    return file


def add_arguments(made: argparse.ArgumentParser) -> None:
    """What the comparisons with llama.cpp take besides the common ones."""
    made.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="where its programs are")
    _ours.add_arguments(made)


def theirs_s(programs: LlamaPrograms, gguf: Path, threads: int, tests: Tests) -> tuple[float, ...]:
    """Seconds of llama.cpp's prefill, decode and rows: medians of the repeats (rows: once)."""
    common = ("-m", gguf, "-t", threads)
    one = ("-p", tests.prompt, "-n", tests.tokens, "-r", tests.repeats, "-o", "jsonl")
    output = programs.run(BENCH, *common, *one)
    prefill_s = parse_llama_bench(output, prompt=tests.prompt, generate=0)
    decode_s = parse_llama_bench(output, prompt=0, generate=tests.tokens)
    if not tests.rows:
        return prefill_s, decode_s, 0.0
    context = tests.rows * (tests.row_prompt + tests.row_tokens)
    many = ("-tb", threads, "-c", context, "--output-format", "jsonl", "-npl", tests.rows)
    lengths = ("-npp", tests.row_prompt, "-ntg", tests.row_tokens)
    output = programs.run(BATCHED, *common, *many, *lengths)
    rows_s = parse_batched_bench(output, rows=tests.rows, steps=tests.row_tokens)
    return prefill_s, decode_s, rows_s


def compare(
    report: Report,
    bundle: Path,
    gguf: Path,
    args: argparse.Namespace,
    bounds: Bounds,
    each_round: Callable[[], None] = lambda: None,
) -> tuple[Series, Series]:
    """The rounds, into the report; seconds of decode of one row, ours and theirs.

    Raises BenchError if llama.cpp is not there, or does not run.
    """
    tests = Tests.read(args)
    ours, theirs = [], []
    with closing(LlamaPrograms(args.llama_bin, (BENCH, BATCHED))) as programs:
        mine = Ours(bundle, args.threads, tests)
        for _ in range(args.rounds):
            theirs.append(theirs_s(programs, gguf, args.threads, tests))
            ours.append(mine.run())
            each_round()
    wanted = (bounds.prefill, bounds.decode, bounds.rows)
    pairs = []
    for test, what in enumerate(tests.names()):
        mine_s = Series(f"ortolan {what}", "s", [run[test] for run in ours])
        their_s = Series(f"llama.cpp {what}", "s", [run[test] for run in theirs])
        report.speed(what, mine_s, their_s, wanted[test])
        pairs.append((mine_s, their_s))
    return pairs[1]


def main() -> int:
    """Run the rounds and report."""
    args_parser = parser(__doc__, rounds=7)
    args_parser.add_argument("--gguf", type=Path, help="the file that BUNDLE was exported from")
    add_arguments(args_parser)
    args = args_parser.parse_args()
    report = Report(f"against llama.cpp, same file, {args.threads} threads each")
    try:
        gguf = source_file(args.gguf, ortolan.Manifest.read(args.bundle))
        bounds = PUBLISHED if gguf.name == PUBLISHED_NAME else OTHER
        compare(report, args.bundle, gguf, args, bounds)
    except BenchError as exc:
        report.skipped = str(exc)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
