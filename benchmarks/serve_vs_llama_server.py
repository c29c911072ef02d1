"""Ortolan's HTTP server against llama-server: same GGUF file, same threads, same clients.

Both run at the same time and are loaded in turn, by `ortolan bench --serve`, whose command is
printed. Streaming clients in a closed loop; greedy, end tokens ignored, so that both make the same
number of tokens.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import Check, Report, Series, ortolan_command, parser
from _servers import llama_server, ortolan_server
from vs_llama_cpp import source_file

import ortolan
from ortolan.bench.peers.llama_cpp import BENCH, LlamaPrograms
from ortolan.errors import BenchError

SPEED, AIM, WAIT = 1.8, 2.4, 0.5  # tokens per second, the aim, and the first token's wait
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


def judge(report: Report, results: Sequence[dict[str, Any]]) -> None:
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
        Check(f"tokens/s, median of the rounds' ratios (aim {AIM}x)", speed, "x", SPEED),
        Check("median time to first token, ours over its", wait, "x", WAIT, at_least=False),
        Check("requests that ortolan lost", lost, "", 0, at_least=False),
        Check("requests that llama-server lost", theirs["requests"] - theirs["completed"]),
    ]


def main() -> int:
    """Start both, compare, end both."""
    args_parser = parser(__doc__, rounds=5)
    args_parser.add_argument("--gguf", type=Path, help="the file that BUNDLE was exported from")
    args_parser.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="where it is")
    for name, default in (("--clients", 16), ("--requests", 96)):
        args_parser.add_argument(name, type=int, default=default, help="default: %(default)s")
    args_parser.add_argument("--prompt-words", default="8,150", help="default: %(default)s")
    args_parser.add_argument("--output-tokens", default="16,64", help="default: %(default)s")
    args_parser.add_argument("--gap-steps", type=float, help="default: the server's own")
    args = args_parser.parse_args()
    flags = () if args.gap_steps is None else ("--gap-steps", args.gap_steps)
    report = Report(
        f"against llama-server, same file, {args.threads} threads each, {args.clients} clients"
    )
    try:
        gguf = source_file(args.gguf, ortolan.Manifest.read(args.bundle))
        programs = LlamaPrograms(args.llama_bin, (BENCH,))
        report.notes.append(f"llama-server of {programs.version()}")
        programs.close()
        with (
            llama_server(gguf, args.threads, args.clients, _SLOT_CONTEXT, args.llama_bin) as theirs,
            ortolan_server(args.bundle, args.threads, *flags) as ours,
        ):
            command, found = bench(args, ours.http, theirs)
        report.notes.append(f"measured by: {shlex.join(['ortolan', *command[3:]])}")
        judge(report, found["results"])
    except BenchError as exc:
        report.skipped = str(exc)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
