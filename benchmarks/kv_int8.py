"""Decode steps at long contexts: an int8 KV cache against a float one, in turn in one process.

The second bundle is made of the same checkpoint with `ortolan export --kv int8`. Both caches are
filled with noise, which takes kernels no other time than keys and values do. Prefill is reported
too, without a bound: its attention reads codes that it has to expand.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from _common import Report, Series, interleaved, parser

from ortolan.bench.measure import open_model
from ortolan.runtime.engine.model import Model
from ortolan.runtime.params import EngineConfig

ROWS, PAST, CHUNK = 16, 2000, 256
BOUND = 1.35


def calls(model: Model) -> dict[str, Callable[[], object]]:
    """A step of 16 rows and of one at 2,000 tokens, and a chunk of a prompt at the start of one."""
    ids = [(7 * place) % model.config.vocab_size for place in range(CHUNK)]
    return {
        f"decode, {ROWS} rows at {PAST:,} tokens": lambda: model.decode(
            0, ids[:ROWS], [PAST] * ROWS
        ),
        f"decode, 1 row at {PAST:,} tokens": lambda: model.decode(0, ids[:1], [PAST]),
        f"prefill, {CHUNK} tokens after none": lambda: model.prefill(0, [ids], [0], [[CHUNK - 1]]),
        f"prefill, {CHUNK} tokens after {PAST - CHUNK:,}": lambda: model.prefill(
            0, [ids], [PAST - CHUNK], [[CHUNK - 1]]
        ),
    }


def main() -> int:
    """Run the rounds and report how many times as fast the int8 cache is."""
    args_parser = parser(__doc__, rounds=15)
    args_parser.add_argument("int8", type=Path, help="the bundle with an int8 KV cache")
    args = args_parser.parse_args()
    report = Report(f"int8 KV against float KV, {args.threads or 'default'} threads")
    # Of one thread, processor time: on a busy machine, wall time means little.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    config = EngineConfig(threads=args.threads)
    opened = [open_model(path, config, ROWS, PAST + 64) for path in (args.int8, args.bundle)]
    for found, wanted in zip(opened, ("int8", "float32"), strict=True):
        if (kv := found.bundle.manifest.dtypes.kv) != wanted:
            raise SystemExit(f"{found.bundle.path}: its KV cache is {kv}, wanted is {wanted}")
    sides = [calls(one.model) for one in opened]
    for place, (name, taken) in enumerate(interleaved(sides, args.rounds, clock).items()):
        ours, theirs = (
            Series(f"{kv}, {name}", "ms", values)
            for kv, values in zip(("int8", "float32"), taken, strict=True)
        )
        report.speed(name, ours, theirs, None if place else BOUND)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
