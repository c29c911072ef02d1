"""Steps of many rows, shared by engines that run beside each other, as `ortolan serve --replicas`.

They are in a process of their own: how sessions share threads is settled once in each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
from _ours import Tests

from ortolan.errors import BenchError, OrtolanError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.opening import open_replicas
from ortolan.runtime.machine import stay_on
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.text.no_tokenizer import open_tokenizer

_MARGIN = 8  # tokens that rows may make beside those of the others' prompts


class RowsBeside:
    """The child process; use it as a context manager."""

    def __init__(self, bundle: Path, threads: int, replicas: int, tests: Tests) -> None:
        given = json.dumps(dataclasses.asdict(tests))
        command = [sys.executable, __file__, str(bundle), str(threads), str(replicas), given]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> RowsBeside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._child.communicate(timeout=60)

    def seconds(self) -> float:
        """Of one run, from the first token of the last row on. Raises BenchError."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(OSError):
            print(file=self._child.stdin, flush=True)
        line = self._child.stdout.readline()
        if not line:
            raise BenchError("the engines beside each other did not start; see above")
        return float(line)


def _read_prompts(engine: Engine, prompts: list[list[int]], steps: int) -> None:
    """Submit them and have each make its first token, which takes a step or more for each."""
    params = SamplingParams(
        temperature=0, max_tokens=steps + len(prompts) + _MARGIN, ignore_eos=True
    )
    handles = [engine.submit(Request(ids, params)) for ids in prompts]
    while not all(handle.events for handle in handles):
        engine.step()


def _run(
    engines: list[tuple[Engine, frozenset[int] | None]], tests: Tests, rng: np.random.Generator
) -> float:
    """Seconds until every engine has made its steps."""
    start = threading.Barrier(len(engines) + 1)

    def steps(engine: Engine, cpus: frozenset[int] | None, count: int) -> None:
        stay_on(cpus)
        shape = (count, tests.row_prompt)
        _read_prompts(engine, rng.integers(0, vocab_size, shape).tolist(), tests.row_tokens)
        start.wait()
        for _ in range(tests.row_tokens):
            engine.step()

    vocab_size = engines[0][0]._model.config.vocab_size
    shares = np.array_split(np.arange(tests.rows), len(engines))
    threads = [
        threading.Thread(target=steps, args=(engine, cpus, len(share)))
        for (engine, cpus), share in zip(engines, shares, strict=True)
    ]
    for thread in threads:
        thread.start()
    start.wait()
    began_s = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began_s
    for engine, _ in engines:
        while engine.step():  # to the answers' ends
            pass
    return seconds


def main() -> int:
    """A run for each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("replicas", type=int)
    parser.add_argument("tests", type=json.loads)
    args = parser.parse_args()
    tests, bundle = Tests(**args.tests), Bundle.open(args.bundle)
    context = min(
        bundle.manifest.model.max_context, max(4096, tests.context + tests.rows + _MARGIN)
    )
    config = EngineConfig(
        threads=args.threads, max_slots=max(tests.rows, 1), max_context=context, prefix_cache_mb=0
    )
    try:
        engines = open_replicas(bundle, config, open_tokenizer(bundle), args.replicas)
    except OrtolanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rng = np.random.default_rng(0)
    _run(engines, tests, rng)  # warms up
    for _ in sys.stdin:
        print(_run(engines, tests, rng), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
