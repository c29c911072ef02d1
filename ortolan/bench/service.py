"""What a measuring process does when it is asked: cases, the machine's peaks, profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortolan.bench.cases import Case, Sample
from ortolan.bench.cost import Cost, Peaks
from ortolan.bench.machine import MachinePeaks
from ortolan.bench.measure import Bench
from ortolan.bench.profile import Profile, profile_case
from ortolan.graphs.contract import DECODE
from ortolan.runtime.params import EngineConfig


class BenchService:
    """Made in a child process, one for each number of threads; see worker.Worker."""

    def __init__(
        self, bundle: Path, engine: dict[str, Any], cases: Sequence[Case], quick: bool
    ) -> None:
        config = EngineConfig(**engine)
        self._bench = Bench(bundle, config, cases)
        self._cases = cases
        nodes = self._bench.nodes[DECODE]
        size = sum(node.weight_bytes for node in nodes)
        assert config.threads is not None
        self._peaks = MachinePeaks(nodes, size, config.threads, quick)

    def warm_up(self) -> None:
        """Run every case once, so that buffers are bound and pages are there."""
        for case in self._cases:
            self._bench.run(case)

    def run(self, case: Case) -> Sample:
        return self._bench.run(case)

    def cost(self, case: Case) -> Cost:
        return self._bench.cost(case)

    def measure_machine(self) -> None:
        self._peaks.measure()

    def peaks(self) -> tuple[Peaks, float]:
        """The best of all rounds so far, and the bandwidth over an array larger than caches."""
        return Peaks(self._peaks.bandwidth, self._peaks.flops), self._peaks.dram_bandwidth

    def profile(self, case: Case) -> Profile:
        self._peaks.measure()  # beside the profile, so that both see the machine as it is then
        return profile_case(self._bench, case, self.peaks()[0])
