"""From the start of `ortolan generate BUNDLE PROMPT --max-tokens 1` to the first byte it prints.

Measured from outside. Warm: the packed cache is there. Cold, which only informs: it is built
first, in a new --cache-dir.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from _common import Check, Report, Series, ortolan_command, parser

WARM_BOUND_S = 1.2
PROMPT = "The capital of France is"
SHOWN = 8
# What `python -X importtime` prints: own and cumulative microseconds, then the module, indented.
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| \s*(\S+)")


def first_byte_s(args: argparse.Namespace, folder: str, *more: object) -> float:
    """Seconds until one run's first byte on standard output."""
    command = ortolan_command(
        "generate", args.bundle, PROMPT, "--max-tokens", 1, "--temperature", 0, *more
    )
    began_s = time.perf_counter()
    with subprocess.Popen(
        [*command, "--threads", str(args.threads)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began_s
        process.stdout.read()
        errors = process.stderr.read().decode(errors="replace")
    if process.returncode != 0 or not first:
        sys.exit(f"ortolan generate exited with {process.returncode}: {errors}")
    return seconds


def import_times(args: argparse.Namespace, folder: str) -> list[str]:
    """Lines on where importing spends its time, by package, of one warm run."""
    command = ortolan_command("generate", args.bundle, PROMPT, "--max-tokens", 1)
    command[1:1] = ["-X", "importtime"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    own_us: Counter[str] = Counter()
    for own, _, module in _IMPORT.findall(done.stderr):
        own_us[module.partition(".")[0]] += int(own)
    lines = [f"imports take {sum(own_us.values()) / 1e6:.3f} s of a warm run (with -X importtime):"]
    return lines + [f"  {name:<24} {us / 1e3:7.1f} ms" for name, us in own_us.most_common(SHOWN)]


def main() -> int:
    """Run warm and cold starts in turn and report."""
    args_parser = parser(__doc__, rounds=10)
    args_parser.add_argument("--cold", type=int, default=2, help="cold runs; default: %(default)s")
    args = args_parser.parse_args()
    args.bundle = args.bundle.resolve()
    report = Report("process start to first token, `ortolan generate`")
    with tempfile.TemporaryDirectory() as folder:
        first_byte_s(args, folder)  # builds the packed cache, if it is not there
        warm = [first_byte_s(args, folder) for _ in range(args.rounds)]
        cold = [
            first_byte_s(args, folder, "--cache-dir", Path(folder) / f"cache{turn}")
            for turn in range(args.cold)
        ]
        report.notes = import_times(args, folder)
    report.series.append(warm_series := Series("warm", "s", warm))
    if cold:
        report.series.append(Series("cold (packs the weights first)", "s", cold))
    report.checks = [
        Check("warm, median", warm_series.median, " s", WARM_BOUND_S, at_least=False),
        Check("warm, best", min(warm), " s"),
    ]
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
