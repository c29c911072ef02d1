"""Time to the first token of a prompt of 900 tokens: 880 of them cached, against none."""

from __future__ import annotations

import sys
from statistics import median

from _common import Check, Report, Series, parser
from _engine import Clock, Prompts, add_clock, engine_on, submit

import ortolan
from ortolan.runtime.engine.engine import Engine

BOUND = 0.15


def first_token(engine: Engine, ids: list[int], cached: int, clock: Clock) -> float:
    """Seconds from submission to the first token; the cache has to have known `cached` tokens."""
    began_s = clock()
    handle = submit(engine, ids, 1)
    while not handle.events:
        engine.step()
    seconds = clock() - began_s
    usage = handle.events[-1].usage
    assert usage is not None
    assert usage.cached_tokens == cached, usage
    return seconds


def main() -> int:
    """Cold and cached in turn, a new prompt each round."""
    args_parser = parser(__doc__, rounds=9)
    args_parser.add_argument("--prompt", type=int, default=900, help="tokens; default: %(default)s")
    args_parser.add_argument("--cached", type=int, default=880, help="tokens; default: %(default)s")
    add_clock(args_parser)
    args = args_parser.parse_args()
    report = Report(f"a prompt of {args.prompt} tokens, {args.cached} of them cached")
    config = ortolan.EngineConfig(threads=args.threads)
    engine, tokenizer = engine_on(args.bundle, config, args.clock)
    prompts = Prompts(tokenizer)
    cold, cached = [], []
    for turn in range(args.rounds + 1):
        ids = prompts.ids(turn, args.prompt)
        other_end = prompts.ids(turn + 1, args.prompt - args.cached)
        cold.append(first_token(engine, ids, 0, args.clock))
        cached.append(first_token(engine, ids[: args.cached] + other_end, args.cached, args.clock))
        engine.forget_prefixes()
    del cold[0], cached[0]  # the first round binds buffers
    report.series = [Series("cold", "s", cold), Series("cached", "s", cached)]
    ratios = [warm_s / cold_s for warm_s, cold_s in zip(cached, cold, strict=True)]
    report.checks = [
        Check("cached, as part of cold, median of the rounds", median(ratios), "", BOUND, False),
        Check("the same, ratio of the best", min(cached) / min(cold)),
    ]
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
