"""Gaps between the tokens of running requests while a prompt of 4,000 tokens is read.

The engine's default states a bound of 4 plain steps (EngineConfig.gap_steps). Plain steps are
measured in the same run, before and after each prompt, at the same number of rows; between the
two, as the rows grow longer, a plain step is taken to grow evenly.
"""

from __future__ import annotations

import sys
from statistics import median

import numpy as np
from _common import Check, Report, Series, parser
from _engine import Clock, Prompts, add_clock, engine_on, finish_all, start_all, submit, tokens_of

import ortolan
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.life import RequestHandle


def plain_gaps(
    engine: Engine, running: list[RequestHandle], steps: int, clock: Clock
) -> list[float]:
    """Seconds of steps that only decode."""
    gaps = []
    for _ in range(steps):
        began_s = clock()
        engine.step()
        gaps.append(clock() - began_s)
        assert all(tokens_of(handle) == 1 for handle in running)
    return gaps


def gaps_beside(
    engine: Engine, running: list[RequestHandle], prompt: RequestHandle, clock: Clock
) -> list[float]:
    """Seconds between tokens of the running requests until `prompt` has its first token."""
    gaps, last_s = [], clock()
    while not prompt.events:
        engine.step()
        taken = [tokens_of(handle) for handle in running]
        if all(taken):
            now_s = clock()
            gaps.append(now_s - last_s)
            last_s = now_s
    return gaps


def main() -> int:
    """Rounds of plain steps, the prompt, plain steps."""
    args_parser = parser(__doc__, rounds=3)
    args_parser.add_argument(
        "--prompt", type=int, default=4000, help="tokens; default: %(default)s"
    )
    args_parser.add_argument(
        "--running", type=int, default=4, help="requests; default: %(default)s"
    )
    args_parser.add_argument("--plain", type=int, default=30, help="steps; default: %(default)s")
    add_clock(args_parser)
    args = args_parser.parse_args()
    clock = args.clock
    report = Report(f"{args.running} running requests while {args.prompt} tokens are read")
    config = ortolan.EngineConfig(threads=args.threads)
    engine, tokenizer = engine_on(args.bundle, config, clock)
    prompts = Prompts(tokenizer)
    plain, beside, took, typical, ratios, worst, noise = [], [], [], [], [], [], []
    for turn in range(args.rounds):
        # As long as it takes: the running ones must not end before the prompt has been read.
        running = [submit(engine, prompts.ids(row, 64), 4000) for row in range(args.running)]
        start_all(engine, running)
        plain_gaps(engine, running, 5, clock)
        before = plain_gaps(engine, running, args.plain, clock)
        began_s = clock()
        handle = submit(engine, prompts.ids(100 + turn, args.prompt), 1)
        gaps = gaps_beside(engine, running, handle, clock)
        took.append(clock() - began_s)
        after = plain_gaps(engine, running, args.plain, clock)
        finish_all(engine, running)
        plain += [median(before), median(after)]
        beside += gaps
        in_steps = np.array(gaps) / np.linspace(median(before), median(after), len(gaps))
        typical.append(median(in_steps))
        ratios.append(float(np.percentile(in_steps, 99)))
        worst.append(float(in_steps.max()))
        scatter = [s / median(part) for part in (before, after) for s in part]
        noise.append(float(np.percentile(scatter, 99)))
    bound = config.gap_steps
    report.series = [
        Series("plain step", "ms", [s * 1e3 for s in plain]),
        Series("gap beside the prompt", "ms", [s * 1e3 for s in beside]),
        Series(f"the prompt of {args.prompt} tokens took", "s", took),
    ]
    report.checks = [
        Check(
            "p99 of the gaps, in plain steps, median of rounds", median(ratios), "", bound, False
        ),
        Check("largest gap, the same", median(worst)),
        Check("median gap, in plain steps", median(typical)),
        Check("p99 of plain steps themselves (the machine's noise)", median(noise)),
    ]
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
