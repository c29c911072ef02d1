"""Decode of 16 requests in the engine against llama.cpp's llama-batched-bench, same file.

Each of the 16 has a prompt of its own; timed are the steps after all prompts have been read. Ours
schedules, samples (greedily) and makes text; llama-batched-bench does none of this.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from _common import Report, Series, parser
from _engine import Prompts, engine_on, finish_all, seconds_of_steps, start_all, submit
from vs_llama_cpp import UnavailableError, find_llama_bench, source_file

import ortolan

BOUND = 2.0


def batched_bench(program: Path, gguf: Path, threads: int, work: tuple[int, int, int]) -> float:
    """Seconds that `tokens` steps of `rows` rows take after prompts of `prompt` tokens."""
    rows, prompt, tokens = work
    sizes = {"-npp": prompt, "-ntg": tokens, "-npl": rows, "-c": rows * (prompt + tokens)}
    command = [str(program), "-m", str(gguf), "-t", str(threads), "-tb", str(threads)]
    command += ["--output-format", "jsonl"]
    command += [str(word) for pair in sizes.items() for word in pair]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise UnavailableError(f"{program.name} failed: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(lines[-1])
    assert (found["pl"], found["tg"]) == (rows, tokens)
    return float(found["t_tg"])


def main() -> int:
    """Run the rounds and report seconds."""
    args_parser = parser(__doc__, rounds=5)
    args_parser.add_argument("--llama-bench", type=Path, help="llama-bench, if not on PATH")
    args_parser.add_argument("--gguf", type=Path, help="the file that BUNDLE was exported from")
    args_parser.add_argument("--fix-links", action="store_true", help="make missing library links")
    args_parser.add_argument("--rows", type=int, default=16, help="default: %(default)s")
    args_parser.add_argument("--prompt", type=int, default=64, help="tokens; default: %(default)s")
    args_parser.add_argument("--tokens", type=int, default=64, help="a row; default: %(default)s")
    args = args_parser.parse_args()
    report = Report(f"{args.rows} rows against llama.cpp's batched benchmark, same file")
    work = (args.rows, args.prompt, args.tokens)
    try:
        found = find_llama_bench(args.llama_bench, args.fix_links)
        program = found.with_name("llama-batched-bench")
        if not program.is_file():
            raise UnavailableError("there is no llama-batched-bench beside llama-bench")
        gguf = source_file(args.gguf, ortolan.Manifest.read(args.bundle))
        # The first ones get tokens while others' prompts are read, at least one of these a step.
        total = args.tokens + 2 + args.rows
        config = ortolan.EngineConfig(
            threads=args.threads,
            max_slots=args.rows,
            max_context=args.prompt + total,
            gap_steps=1000.0,  # prompts are not what is timed
        )
        engine, tokenizer = engine_on(args.bundle, config)
        prompts = Prompts(tokenizer)
        ours_s, theirs_s = [], []
        for _ in range(args.rounds):
            theirs_s.append(batched_bench(program, gguf, args.threads, work))
            handles = [
                submit(engine, prompts.ids(row, args.prompt), total) for row in range(args.rows)
            ]
            start_all(engine, handles)
            ours_s.append(seconds_of_steps(engine, args.tokens, handles))
            finish_all(engine, handles)
    except UnavailableError as exc:
        report.skipped = str(exc)
        return report.finish(args.as_json)
    what = f"{args.rows} rows, {args.tokens} steps"
    report.speed(
        what,
        Series(f"ortolan {what}", "s", ours_s),
        Series(f"llama.cpp {what}", "s", theirs_s),
        BOUND,
    )
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
