"""A comparison: a process for each provider, rounds interleaved, whoever fails left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortolan.bench.cases import Case, Plan, Sample
from ortolan.bench.compare.environments import Environment, probe, python_of
from ortolan.bench.compare.service import ProviderService
from ortolan.bench.machine import OtherWork
from ortolan.bench.peers.base import Peer, open_peer
from ortolan.bench.worker import Worker
from ortolan.errors import OrtolanError
from ortolan.graphs.manifest import Manifest

Progress = Callable[[str], None]


@dataclass
class Side:
    """One provider, or another engine, in a comparison.

    reason: why it could not run, a sentence; its samples are then incomplete and not shown.
    described: what its process says of itself; see ProviderService.describe.
    """

    name: str
    environment: Environment | None = None
    described: dict[str, Any] = field(default_factory=dict)
    peer: Peer | None = None
    workers: dict[int, Worker] = field(default_factory=dict)
    samples: dict[Case, list[Sample]] = field(default_factory=dict)
    reason: str = ""

    def run(self, case: Case) -> Sample:
        if self.peer is not None:
            return self.peer.run(case)
        sample: Sample = self.workers[case.threads].call("run", case)
        return sample

    def supports(self, case: Case) -> bool:
        return self.peer is None or self.peer.supports(case)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        if self.peer is not None:
            self.peer.close()


@dataclass(frozen=True)
class Comparison:
    """What was found; `sides` in the order in which they were named."""

    manifest: Manifest
    plan: Plan
    cases: list[Case]
    sides: list[Side]
    left_out: list[str]  # what the bundle has no positions for
    busy_elsewhere: float | None  # cores that other processes used meanwhile

    @property
    def first(self) -> Side | None:
        """Whom ratios are taken to: the first that ran."""
        return next((side for side in self.sides if not side.reason), None)


def run_comparison(
    bundle: Path,
    plan: Plan,
    providers: Sequence[str],
    pythons: dict[str, Path],
    against: Sequence[str] = (),
    llama_bin: Path | None = None,
    progress: Progress = lambda text: None,
) -> Comparison:
    """Measure prefill and decode of a bundle on each provider, and on other engines beside them.

    pythons: the ones that --env names. A round runs every case once on every side, another one
    first each time. A side that cannot run keeps its reason; the others go on.
    Raises OrtolanError for what no side could do anything about; no process outlives the call.
    """
    manifest = Manifest.read(bundle)
    others = OtherWork()
    max_context = manifest.model.max_context
    cases = [
        case
        for threads in plan.threads
        for case in plan.cases(threads, max_context)
        # Whole requests are sampled and scheduled as well, which differs little by provider.
        if case.phase != "generate"
    ]
    with ExitStack() as stack:
        sides = []
        for name in providers:
            sides.append(side := Side(name))
            stack.callback(side.close)
            progress(f"loading and warming up {name}")
            with _kept(side):
                _open(side, bundle, plan, cases, pythons)
        for spec in against:
            peer = open_peer(spec, llama_bin)
            # OpenVINO GenAI has the name of a provider, too.
            name = peer.name if peer.name not in providers else f"{peer.name}, --against"
            sides.append(side := Side(name, peer=peer))
            stack.callback(side.close)
        _rounds(sides, cases, plan.repeat, progress)
    return Comparison(
        manifest=manifest,
        plan=plan,
        cases=cases,
        sides=sides,
        left_out=plan.left_out(max_context),
        # Only now, when the processes that have measured count as our own.
        busy_elsewhere=others.cores(),
    )


def _open(
    side: Side, bundle: Path, plan: Plan, cases: Sequence[Case], pythons: dict[str, Path]
) -> None:
    """Its processes, one for each number of threads, each of which has run every case once."""
    side.environment = probe(python_of(side.name, pythons))
    for threads in plan.threads:
        own = [case for case in cases if case.threads == threads]
        engine = {**plan.engine, "provider": side.name, "threads": threads}
        worker = Worker(
            ProviderService, bundle.absolute(), engine, own, python=side.environment.python
        )
        side.workers[threads] = worker
        side.described = worker.call("describe")
        for case in own:
            worker.call("run", case)


def _rounds(sides: Sequence[Side], cases: Sequence[Case], repeat: int, progress: Progress) -> None:
    for turn in range(repeat):
        for case in cases:
            running = [side for side in sides if not side.reason and side.supports(case)]
            shift = turn % max(len(running), 1)
            for side in running[shift:] + running[:shift]:
                progress(f"round {turn + 1} of {repeat}: {case.name}, {side.name}")
                with _kept(side):
                    sample = side.run(case)
                    side.samples.setdefault(case, []).append(sample)


@contextmanager
def _kept(side: Side) -> Iterator[None]:
    """What goes wrong is the side's reason, and the end of it."""
    try:
        yield
    except OrtolanError as error:
        side.reason = str(error)
        side.samples.clear()
        side.close()
