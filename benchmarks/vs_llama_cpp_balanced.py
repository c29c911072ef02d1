"""Preset `balanced` against llama.cpp's Q8_0 and Q4_0, with the same number of threads.

Both files are made by llama-quantize from the GGUF that BUNDLE was exported from. Each round runs
llama.cpp on either, then Ortolan (never two at once): prefill, decode of one row, steps of many
rows, as in vs_llama_cpp.py. One row is decoded by an engine of one slot, many by one of as many
slots: each takes the graph that it would take by itself. With --replicas, as many engines share the
many rows and the threads. The bundle's accuracy, as its report has it, comes first: it must be what
the preset promises.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from _common import Check, Report, Series, parser
from _other_python import OtherPython
from _ours import Ours, Tests
from vs_llama_cpp import KINDS, QUANTIZE, add_arguments, requantized, source_file, theirs_s

import ortolan
from ortolan.bench.peers.llama_cpp import BATCHED, BENCH, LlamaPrograms
from ortolan.errors import BenchError
from ortolan.export.presets import PRESETS

# How many times as fast as each file; None: no bound. Rows: as the faster of the two.
BOUNDS = {
    "prefill": {"Q8_0": 1.7, "Q4_0": 1.2},
    "decode": {"Q8_0": 1.0, "Q4_0": None},
}
ROWS_BOUND = 1.1


def check_accuracy(report: Report, manifest: ortolan.Manifest) -> None:
    """The bundle's own figures against the preset's bound.

    Raises BenchError if the bundle has none, or is not the preset's.
    """
    if manifest.preset != "balanced" or not manifest.accuracy_reports:
        raise BenchError("the bundle has no report of preset balanced; export it with --preset")
    bound = PRESETS["balanced"].bound
    for found in manifest.accuracy_reports:
        kl, top1 = found.total.mean_kl, found.total.top1_agreement
        report.notes.append(f"{found.phase}: mean KL {kl:.4f}, top-1 {top1:.3f}")
        report.checks.append(
            Check(f"{found.phase}, mean KL allowed over it", bound.mean_kl / kl, "x", 1.0)
        )
        report.checks.append(Check(f"{found.phase}, top-1", top1, "", bound.top1))


def measured(
    args: argparse.Namespace, files: dict[str, Path], programs: LlamaPrograms
) -> tuple[Tests, dict[str, list[tuple[float, ...]]]]:
    """Seconds of prefill, decode and rows of every round, by side."""
    tests = Tests.read(args)
    one = Ours(args.bundle, args.threads, dataclasses.replace(tests, rows=0))
    runs: dict[str, list[tuple[float, ...]]] = {side: [] for side in (*files, "ours")}
    with ExitStack() as stack:
        rows_s = rows_of(args, tests, stack)
        for _ in range(args.rounds):
            for kind, file in files.items():
                runs[kind].append(theirs_s(programs, file, args.threads, tests))
            alone = one.run()
            runs["ours"].append((*alone[:2], rows_s()))
    return tests, runs


def rows_of(args: argparse.Namespace, tests: Tests, stack: ExitStack) -> Callable[[], float]:
    """What measures the seconds of many rows, by one engine or several."""
    if args.replicas > 1:
        given = [str(args.bundle), str(args.threads), str(args.replicas)]
        beside = OtherPython("ortolan", sys.executable, "_rows_beside.py", given, tests)
        stack.callback(beside.close)
        return lambda: beside.run()[0]
    many = Ours(args.bundle, args.threads, tests)
    return lambda: many.run()[2]


def report_ratios(report: Report, tests: Tests, runs: dict[str, list[tuple[float, ...]]]) -> None:
    """Each ratio with its bound."""
    for test, what in enumerate(tests.names()):
        mine = Series(f"ortolan {what}", "s", [run[test] for run in runs["ours"]])
        theirs = {
            kind: Series(f"llama.cpp {kind} {what}", "s", [run[test] for run in runs[kind]])
            for kind in runs
            if kind != "ours"
        }
        bounds = BOUNDS.get(what.split()[0])
        if bounds is None:
            best = min(theirs.values(), key=lambda series: series.median)
            report.speed(what, mine, best, ROWS_BOUND)
            continue
        for kind, bound in bounds.items():
            report.speed(f"{what}, {kind}", mine, theirs[kind], bound)


def main() -> int:
    """Run the rounds and report."""
    args_parser = parser(__doc__, rounds=5)
    args_parser.add_argument("--gguf", type=Path, help="the file that BUNDLE was exported from")
    args_parser.add_argument(
        "--replicas", type=int, default=1, help="engines for the many rows; default: %(default)s"
    )
    add_arguments(args_parser)
    args = args_parser.parse_args()
    report = Report(f"balanced against llama.cpp, {args.threads} threads each")
    try:
        manifest = ortolan.Manifest.read(args.bundle)
        check_accuracy(report, manifest)
        gguf = source_file(args.gguf, manifest)
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(LlamaPrograms(args.llama_bin, (BENCH, BATCHED, QUANTIZE))) as programs,
        ):
            files = {kind: requantized(programs, gguf, Path(folder), kind) for kind in KINDS}
            report_ratios(report, *measured(args, files, programs))
    except BenchError as exc:
        report.skipped = str(exc)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
