"""The whole run: servers in turn, round by round, only one of them loaded at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortolan.bench.serving.drive import Round, closed_loop, open_loop
from ortolan.bench.serving.load import ServePlan
from ortolan.bench.serving.servers import OpenServer, open_server, read_address
from ortolan.errors import BenchError, UsageError

if TYPE_CHECKING:
    from ortolan.client.access import AccessSettings

Progress = Callable[[str], None]
# Something that can be opened and measured as a server is.
Opener = Callable[[], Awaitable[OpenServer]]


@dataclass(frozen=True)
class ServeResults:
    """Everything that a run found. rounds: by server, one for each round; the first is ours."""

    plan: ServePlan
    servers: list[OpenServer]
    rounds: dict[str, list[Round]]


def run_serve_bench(
    addresses: Sequence[str],
    plan: ServePlan,
    progress: Progress = lambda text: None,
    access: AccessSettings | None = None,
) -> ServeResults:
    """Measure the servers at the addresses; the others are compared with the first.

    access: for all of them, the files where an address asks for TLS.
    Raises UsageError for what is no address, BenchError or another OrtolanError if a server does
    not answer.
    """
    servers = [read_address(address) for address in addresses]
    if len({server.name for server in servers}) < len(servers):
        raise UsageError("an address is given twice; compare a server with another one")
    given: AccessSettings = access or {}
    openers = [
        lambda server=server: open_server(server, plan.ignore_eos, given) for server in servers
    ]
    return asyncio.run(compare(openers, plan, progress))


async def compare(
    openers: Sequence[Opener], plan: ServePlan, progress: Progress = lambda text: None
) -> ServeResults:
    """The rounds on all that the openers open, which is closed at the end.

    Raises BenchError if a server answers none of the warm-up requests.
    """
    async with AsyncExitStack() as stack:
        servers = []
        for opener in openers:
            servers.append(await opener())
            stack.push_async_callback(servers[-1].wire.close)
        for server in servers:
            progress(f"warming up {server.name}")
            await _warm_up(server, plan)
        rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
        for turn in range(plan.repeat):
            # Another server first each round, so that none always follows the same one.
            shift = turn % len(servers)
            for server in servers[shift:] + servers[:shift]:
                progress(f"round {turn + 1} of {plan.repeat}: {server.name}")
                rounds[server.name].append(await _round(server, plan, turn))
    return ServeResults(plan, servers, rounds)


async def _warm_up(server: OpenServer, plan: ServePlan) -> None:
    requests = plan.warm_up_round()
    if not requests:
        return
    found = await closed_loop(server.wire, requests, plan.num_clients, plan.timeout_s)
    if not found.whole:
        outcome = found.answers[0].outcome
        raise BenchError(
            f"{server.name} answered none of {len(requests)} warm-up requests; the first: "
            f"{outcome.lost}: {outcome.detail}"
        )


async def _round(server: OpenServer, plan: ServePlan, turn: int) -> Round:
    requests = plan.round(turn)
    if plan.closed_loop:
        return await closed_loop(server.wire, requests, plan.num_clients, plan.timeout_s)
    return await open_loop(server.wire, requests, plan.arrivals_s(turn), plan.timeout_s)
