"""One bundle's graphs against another's: the model's calls alone, in turn in one process.

No bound: it is for changes of the graphs. Export the same checkpoint before and after the change
and give both. With one thread, processor time is taken instead of the clock's: it holds its
ratios within a few per cent on a busy machine, where wall time of two threads means nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _common import Report, Series, interleaved, parser

import ortolan

PROMPT, PAST, ROWS = 400, 128, 16


def calls(bundle: Path, threads: int) -> dict[str, Callable[[], object]]:
    """Prefill of 400 tokens in the engine's chunks; decode steps of 1 and 16 rows at length 128."""
    llm = ortolan.load(bundle, threads=threads, max_slots=ROWS, max_context=PROMPT + 1)
    model, chunk = llm._running()._model, llm.config.prefill_chunk
    ids = np.random.default_rng(0).integers(0, llm.manifest.model.vocab_size, PROMPT).tolist()

    def prefill(row: int = 0, tokens: int = PROMPT) -> None:
        for start in range(0, tokens, chunk):
            piece = ids[start : min(start + chunk, tokens)]
            model.prefill(row, [piece], [start], [[len(piece) - 1]])

    for row in range(ROWS):
        prefill(row, PAST)
    return {
        "prefill 400": prefill,
        "decode 1 row": lambda: model.decode(0, ids[:1], [PAST]),
        "decode 16 rows": lambda: model.decode(0, ids[:ROWS], [PAST] * ROWS),
    }


def main() -> int:
    """Run the rounds and report how many times as fast the first bundle is."""
    args_parser = parser(__doc__, rounds=30)
    args_parser.add_argument("other", type=Path, help="the bundle to compare with")
    args_parser.set_defaults(threads=1)
    args = args_parser.parse_args()
    report = Report(f"{args.bundle.name} against {args.other.name}, {args.threads} threads")
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    sides = [calls(args.bundle, args.threads), calls(args.other, args.threads)]
    for name, taken in interleaved(sides, args.rounds, clock).items():
        first, second = (
            Series(f"{bundle.name}, {name}", "ms", values)
            for bundle, values in zip((args.bundle, args.other), taken, strict=True)
        )
        report.speed(name, first, second)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
