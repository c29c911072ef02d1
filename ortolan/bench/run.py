"""The whole run: processes started, rounds interleaved, everything ended at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ortolan.bench.cases import Case, Plan, Sample
from ortolan.bench.cost import Cost, Peaks
from ortolan.bench.machine import OtherWork
from ortolan.bench.peers.base import Peer, open_peer
from ortolan.bench.service import BenchService
from ortolan.bench.worker import Worker
from ortolan.graphs.manifest import Manifest
from ortolan.optional import require

if TYPE_CHECKING:
    from ortolan.bench.profile import Profile

OURS = "ortolan"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Results:
    """Everything that a run found. samples: by system and case, one for each round."""

    manifest: Manifest
    plan: Plan
    cases: list[Case]
    samples: dict[str, dict[Case, list[Sample]]]
    costs: dict[Case, Cost]
    peaks: dict[int, Peaks]
    dram_bandwidth: dict[int, float]
    peers: dict[str, tuple[str, str]]  # name -> version, note
    left_out: list[str]  # what the bundle has no positions for
    profiles: list[Profile]
    busy_elsewhere: float | None  # cores that other processes used meanwhile


def run_bench(
    bundle: Path,
    plan: Plan,
    against: Sequence[str] = (),
    llama_bin: Path | None = None,
    progress: Progress = lambda text: None,
) -> Results:
    """Measure `plan` on a bundle, and each of `against` in the same rounds.

    Each number of threads has a process of its own. A round runs every case once on every system,
    so that what else the machine does hits all alike; warm-up runs come before and do not count.
    Raises OrtolanError; no process outlives the call.
    """
    require("onnx", "bench", "counting a graph's work")
    require("onnxruntime", "cpu", "running a model")
    manifest = Manifest.read(bundle)
    others = OtherWork()
    max_context = manifest.model.max_context
    cases = {threads: plan.cases(threads, max_context) for threads in plan.threads}
    with ExitStack() as stack:
        peers = []
        for spec in against:
            peers.append(open_peer(spec, llama_bin))
            stack.callback(peers[-1].close)
        workers = {}
        for threads, own in cases.items():
            progress(f"loading and warming up with {threads} threads")
            engine = {**plan.engine, "threads": threads}
            worker = Worker(BenchService, bundle.absolute(), engine, own, plan.quick)
            workers[threads] = worker
            stack.callback(worker.close)
            worker.call("warm_up")
        samples = _rounds(cases, workers, peers, plan.repeat, progress)
        profiles = []
        if plan.profile:
            threads = plan.threads[-1]
            for case in profiled_cases(cases[threads]):
                progress(f"profiling {case.name}")
                profiles.append(workers[threads].call("profile", case))
        found = {threads: worker.call("peaks") for threads, worker in workers.items()}
        costs = {case: workers[t].call("cost", case) for t, own in cases.items() for case in own}
    return Results(
        manifest=manifest,
        plan=plan,
        cases=[case for own in cases.values() for case in own],
        samples=samples,
        costs=costs,
        peaks={threads: peaks for threads, (peaks, _) in found.items()},
        dram_bandwidth={threads: rate for threads, (_, rate) in found.items()},
        peers={peer.name: (peer.version, peer.note) for peer in peers},
        left_out=plan.left_out(max_context),
        profiles=profiles,
        # Only now, when the processes that have measured count as our own.
        busy_elsewhere=others.cores(),
    )


def _rounds(
    cases: dict[int, list[Case]],
    workers: dict[int, Worker],
    peers: Sequence[Peer],
    repeat: int,
    progress: Progress,
) -> dict[str, dict[Case, list[Sample]]]:
    samples: dict[str, dict[Case, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(repeat):
        for threads, own in cases.items():
            workers[threads].call("measure_machine")
            for case in own:
                progress(f"round {turn + 1} of {repeat}: {case.name}, {threads} threads")
                sides: list[Peer | None] = [None, *(p for p in peers if p.supports(case))]
                # Another side first each round, so that none always follows the same one.
                for peer in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                    name = OURS if peer is None else peer.name
                    run = workers[threads].call("run", case) if peer is None else peer.run(case)
                    samples[name][case].append(run)
    return {name: dict(found) for name, found in samples.items()}


def profiled_cases(cases: Sequence[Case]) -> list[Case]:
    """The longest prompt, and decode of the fewest and of the most rows at the first context."""
    longest = max((case for case in cases if case.phase == "prefill"), key=lambda case: case.tokens)
    context = next(case.context for case in cases if case.phase == "decode")
    decodes = [case for case in cases if case.phase == "decode" and case.context == context]
    decodes.sort(key=lambda case: case.batch)
    return [longest, *dict.fromkeys((decodes[0], decodes[-1]))]
