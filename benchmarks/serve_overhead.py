"""What serving costs: gRPC and HTTP against the engine itself, on the same load.

The engine runs in this process behind AsyncEngine; `ortolan serve` runs beside it. They are loaded
in turn, round by round, by the same clients.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence

from _common import Check, Report, Series, parser
from _engine_wire import EngineWire
from _servers import ortolan_server

from ortolan.bench.serving.drive import Round
from ortolan.bench.serving.load import ServePlan
from ortolan.bench.serving.report import median_ttft_s, tokens_per_s
from ortolan.bench.serving.rounds import Opener, ServeResults, compare
from ortolan.bench.serving.servers import OpenServer, open_server, read_address
from ortolan.errors import BenchError

ENGINE = "engine"
BOUNDS = {"gRPC": 0.85, "HTTP": 0.75}  # tokens per second over the engine's
MOST_WAIT_MS = 8.0


async def measure(
    args: argparse.Namespace, addresses: dict[str, str]
) -> tuple[ServeResults, ServeResults]:
    """The mix of many clients, and single short requests."""
    mix = ServePlan(
        clients=args.clients, requests=args.requests, repeat=args.rounds, ignore_eos=True
    )
    single = ServePlan(
        requests=args.singles,
        prompt_words=(8, 8),
        output_tokens=(8, 8),
        clients=1,
        repeat=args.rounds,
        ignore_eos=True,
    )
    engine = EngineWire(args.bundle, args.threads)
    try:
        found = []
        for plan in (mix, single):
            await engine.prepare(plan)
            openers = [opened(engine), *(dialled(address) for address in addresses.values())]
            found.append(await compare(openers, plan))
    finally:
        await engine.stop()
    return found[0], found[1]


def opened(engine: EngineWire) -> Opener:
    """The engine as something to compare with."""

    async def open_engine() -> OpenServer:
        return OpenServer(ENGINE, "none", engine)

    return open_engine


def dialled(address: str) -> Opener:
    """A server at an address."""
    return lambda: open_server(read_address(address), ignore_eos=True)


def judge(
    report: Report, addresses: dict[str, str], mix: ServeResults, single: ServeResults
) -> None:
    """Both comparisons into the report."""
    names = {ENGINE: ENGINE, **addresses}
    for name, key in names.items():
        rates = [tokens_per_s(found) for found in mix.rounds[key]]
        report.series.append(Series(f"{name} output", "tokens/s", rates))
    waits = {name: first_token_ms(single.rounds[key]) for name, key in names.items()}
    report.series += [Series(f"{name} first token", "ms", found) for name, found in waits.items()]
    engine = report.series[0]
    for series in report.series[1 : len(names)]:
        name = series.name.partition(" ")[0]
        ratios = [a / b for a, b in zip(series.values, engine.values, strict=True)]
        what = f"{name} over the engine, tokens/s, rounds' median"
        report.checks.append(Check(what, statistics.median(ratios), "x", BOUNDS[name]))
    for name, bound in (("gRPC", MOST_WAIT_MS), ("HTTP", None)):
        more = [a - b for a, b in zip(waits[name], waits[ENGINE], strict=True)]
        what = f"{name} first token after the engine's, rounds' median"
        report.checks.append(Check(what, statistics.median(more), "ms", bound, at_least=False))
    everything = [*mix.rounds.values(), *single.rounds.values()]
    lost = sum(len(one.answers) - len(one.whole) for rounds in everything for one in rounds)
    report.checks.append(Check("requests lost", lost, "", 0, at_least=False))


def first_token_ms(rounds: Sequence[Round]) -> list[float]:
    """Median time to the first token of each round. Raises BenchError if one answered nothing."""
    waits_s = [median_ttft_s(found) for found in rounds]
    if None in waits_s:
        raise BenchError("a round answered no request")
    return [wait_s * 1e3 for wait_s in waits_s if wait_s is not None]


def main() -> int:
    """Start the server, compare, end it."""
    args_parser = parser(__doc__, rounds=7)
    for name, default, what in (
        ("--clients", 16, "of the mix"),
        ("--requests", 96, "of the mix, a round"),
        ("--singles", 8, "single short requests, a round"),
    ):
        args_parser.add_argument(name, type=int, default=default, help=f"{what}; %(default)s")
    args = args_parser.parse_args()
    report = Report(f"what serving costs, {args.threads} threads, {args.clients} clients")
    try:
        with ortolan_server(args.bundle, args.threads) as ours:
            addresses = {"gRPC": ours.grpc, "HTTP": ours.http}
            judge(report, addresses, *asyncio.run(measure(args, addresses)))
    except BenchError as exc:
        report.skipped = str(exc)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
