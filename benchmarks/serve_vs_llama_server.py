"""Ortolan's HTTP server against llama-server: same model, same threads, same clients.

llama-server gets the file that BUNDLE was exported from or, with --type, what llama-quantize makes
of it: Q4_0 for a bundle of preset balanced. Both run at the same time and are loaded in turn, by
`ortolan bench --serve`, whose command is printed. Streaming clients in a closed loop; greedy, end
tokens ignored, so that both make the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Check, Report, Series, ortolan_command, parser
from _servers import llama_server, ortolan_server
from vs_llama_cpp import KINDS, QUANTIZE, requantized, source_file

import ortolan
from ortolan.bench.peers.llama_cpp import BENCH, LlamaPrograms
from ortolan.errors import BenchError


@dataclass(frozen=True)
class Bounds:
    """speed: how many times its tokens/s; wait: the first token's, ours over its. None: no bound.

    aim: a note on what is aimed at, in brackets.
    """

    speed: float | None
    wait: float | None
    aim: str = ""


SAME_FILE = Bounds(1.8, 0.5, " (aim 2.4x)")
BALANCED = Bounds(1.5, 0.5, " (aim 1.9x)")
NOT_JUDGED = Bounds(None, None)
_SLOT_CONTEXT = 1024  # more than the longest prompt and answer


def bench(args: argparse.Namespace, ours: str, theirs: str) -> tuple[list[str], dict[str, Any]]:
    """The command that measures both, and its JSON."""
    command = ortolan_command(
        *("bench", "--serve", ours, "--against", theirs, "--clients", args.clients),
        *("--requests", args.requests, "--prompt-words", args.prompt_words),
        *("--output-tokens", args.output_tokens, "--repeat", args.rounds),
        *("--ignore-eos", "--output", "json"),
    )
    # In another folder than the repository's root; see ortolan_command.
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise BenchError(f"ortolan bench failed: {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return command, found


def bounds_of(kind: str | None, preset: str) -> Bounds:
    """What is judged: the same file, or preset balanced against Q4_0."""
    if kind is None:
        return SAME_FILE
    return BALANCED if (kind, preset) == ("Q4_0", "balanced") else NOT_JUDGED


def judge(report: Report, results: Sequence[dict[str, Any]], bounds: Bounds) -> None:
    """The two servers' results, ours first, into the report."""
    mine, theirs = results
    for name, row in (("ortolan", mine), ("llama-server", theirs)):
        report.series.append(Series(f"{name} output", "tokens/s", row["tokens_per_s"]["samples"]))
        waits = row["ttft_ms"]
        if waits is not None:
            shown = ", ".join(f"{key} {value:.0f}" for key, value in waits.items())
            report.notes.append(f"{name}, time to first token in ms: {shown}")
        for kind, lost in row["lost"].items():
            report.notes.append(f"{name} lost {lost['count']}: {kind}: {lost['first']}")
        if row["resent"]:
            report.notes.append(f"{name} closed a kept connection under {row['resent']} requests")
    ratio = theirs["ratio"]
    if ratio["tokens_per_s"] is None or ratio["ttft"] is None:
        raise BenchError("one of the servers answered no request; see what was lost")
    speed, wait = ratio["tokens_per_s"]["median"], 1 / ratio["ttft"]["median"]
    lost = mine["requests"] - mine["completed"]
    report.checks += [
        Check(f"tokens/s, median of the rounds' ratios{bounds.aim}", speed, "x", bounds.speed),
        Check("median time to first token, ours over its", wait, "x", bounds.wait, at_least=False),
        Check("requests that ortolan lost", lost, "", 0, at_least=False),
        Check("requests that llama-server lost", theirs["requests"] - theirs["completed"]),
    ]


def compared(args: argparse.Namespace, gguf: Path, report: Report) -> dict[str, Any]:
    """What `ortolan bench` found of both servers, each started for it."""
    flags: list[object] = ["--replicas", args.replicas]
    if args.gap_steps is not None:
        flags += ["--gap-steps", args.gap_steps]
    with (
        llama_server(gguf, args.threads, args.clients, _SLOT_CONTEXT, args.llama_bin) as theirs,
        ortolan_server(args.bundle, args.threads, *flags) as ours,
    ):
        command, found = bench(args, ours.http, theirs)
    report.notes.append(f"measured by: {shlex.join(['ortolan', *command[3:]])}")
    return found


def main() -> int:
    """Start both, compare, end both."""
    args_parser = parser(__doc__, rounds=5)
    args_parser.add_argument("--gguf", type=Path, help="the file that BUNDLE was exported from")
    args_parser.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="where it is")
    for name, default in (("--clients", 16), ("--requests", 96)):
        args_parser.add_argument(name, type=int, default=default, help="default: %(default)s")
    args_parser.add_argument("--prompt-words", default="8,150", help="default: %(default)s")
    args_parser.add_argument("--output-tokens", default="16,64", help="default: %(default)s")
    args_parser.add_argument(
        "--type", choices=KINDS, help="what llama-server's file is made to; default: as it is"
    )
    args_parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="of our engine, which share its threads; default: %(default)s",
    )
    args_parser.add_argument("--gap-steps", type=float, help="default: the server's own")
    args = args_parser.parse_args()
    needed = (BENCH, QUANTIZE) if args.type else (BENCH,)
    file = f"with {args.type}" if args.type else "same file"
    report = Report(
        f"against llama-server {file}, {args.threads} threads each, {args.clients} clients, "
        f"replicas of ours: {args.replicas}"
    )
    try:
        manifest = ortolan.Manifest.read(args.bundle)
        gguf = source_file(args.gguf, manifest)
        report.notes.append(f"the bundle's preset: {manifest.preset or 'none'}")
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(LlamaPrograms(args.llama_bin, needed)) as programs,
        ):
            report.notes.append(f"llama-server of {programs.version()}")
            if args.type:
                gguf = requantized(programs, gguf, Path(folder), args.type)
            found = compared(args, gguf, report)
        judge(report, found["results"], bounds_of(args.type, manifest.preset))
    except BenchError as exc:
        report.skipped = str(exc)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
