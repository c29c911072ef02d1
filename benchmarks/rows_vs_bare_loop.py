"""Steps of 16 requests in the engine against a bare loop over the same model.

The bare loop calls Model.decode and numpy's argmax, nothing else. Both run in one process on the
same sessions and KV cache, in alternating blocks of steps, over the same prompts at the same
lengths. Ours schedules, samples (greedily), makes text and events.
"""

from __future__ import annotations

import sys
from statistics import median

from _common import Check, Report, Series, alternated, parser
from _engine import Clock, Prompts, add_clock, engine_on, seconds_of_steps, start_all, submit

import ortolan
from ortolan.runtime.engine.chunks import chunk_sizes
from ortolan.runtime.engine.life import RequestHandle
from ortolan.runtime.engine.model import Model

BOUND = 0.9
CHUNK = 256


class BareRows:
    """Greedy decoding of the slots from `first` on, by the model's calls alone."""

    def __init__(
        self, model: Model, first: int, handles: list[RequestHandle], clock: Clock
    ) -> None:
        """Where the requests are now: some have had tokens while others' prompts were read."""
        choices = [handle.choices[0] for handle in handles]
        self._model, self._clock = model, clock
        self._first = first
        self._lengths = [choice.stored for choice in choices]
        self._last = [choice.tokens[choice.stored] for choice in choices]
        for row, choice in enumerate(choices):
            start = 0
            for size in chunk_sizes(choice.stored, CHUNK):
                ids = choice.tokens[start : start + size]
                model.prefill(first + row, [ids], [start], [[size - 1]])
                start += size

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        began_s = self._clock()
        for _ in range(count):
            logits = self._model.decode(self._first, self._last, self._lengths)
            self._last = logits.argmax(axis=1).tolist()
            self._lengths = [length + 1 for length in self._lengths]
        return self._clock() - began_s


class InSession:
    """Adds up the seconds that a model's decode takes."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self.seconds = 0.0
        decode = model.decode

        def timed(*args: object) -> object:
            began_s = clock()
            try:
                return decode(*args)  # type: ignore[arg-type]
            finally:
                self.seconds += clock() - began_s

        model.decode = timed  # type: ignore[method-assign,assignment]


def main() -> int:
    """Alternate blocks of steps and report seconds per step."""
    args_parser = parser(__doc__, rounds=30)
    args_parser.add_argument("--rows", type=int, default=16, help="default: %(default)s")
    args_parser.add_argument("--block", type=int, default=4, help="steps; default: %(default)s")
    args_parser.add_argument("--prompt", type=int, default=64, help="tokens; default: %(default)s")
    add_clock(args_parser)
    args = args_parser.parse_args()
    report = Report(f"{args.rows} rows against a bare loop over the same model")
    rows = args.rows
    # Those whose prompts are read first get tokens while the others' are read, one a step or more.
    total = args.rounds * args.block + 4 + rows
    config = ortolan.EngineConfig(
        threads=args.threads,
        max_slots=2 * rows,
        max_context=args.prompt + total,
        gap_steps=1000.0,  # prompts are not what is timed
    )
    engine, tokenizer = engine_on(args.bundle, config, args.clock)
    prompts = [Prompts(tokenizer).ids(row, args.prompt) for row in range(rows)]
    model = engine._model
    assert isinstance(model, Model)
    handles = [submit(engine, ids, total) for ids in prompts]
    start_all(engine, handles)
    bare = BareRows(model, rows, handles, args.clock)
    timer = InSession(model, args.clock)
    seconds_of_steps(engine, 2, handles), bare.steps(2)
    found: dict[str, list[float]] = {"ours": [], "bare": [], "outside": []}
    for turn in range(args.rounds):
        for side in alternated(("ours", "bare"), turn):
            timer.seconds = 0.0
            if side == "bare":
                found[side].append(bare.steps(args.block))
                continue
            found[side].append(seconds_of_steps(engine, args.block, handles, args.clock))
            found["outside"].append((found[side][-1] - timer.seconds) / args.block)
    ours, theirs = (
        Series(name, "ms/step", [s / args.block * 1e3 for s in found[side]])
        for name, side in (("ortolan", "ours"), ("bare loop", "bare"))
    )
    report.speed(f"{rows} rows", ours, theirs, BOUND)
    report.checks.append(Check("a step outside the session", median(found["outside"]) * 1e3, " ms"))
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
