"""Steps of many rows, shared by engines that run beside each other, as `ortolan serve --replicas`.

In a process of their own, since how sessions share threads is settled once in each: a line in is a
round, a line out is it. Arguments: the bundle, threads, replicas, and the tests as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
from _ours import Tests

import ortolan
from ortolan.errors import OrtolanError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.opening import open_replicas
from ortolan.runtime.machine import stay_on
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.text.no_tokenizer import open_tokenizer

_MARGIN = 8  # tokens that rows may make beside those of the others' prompts


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

    def steps(engine: Engine, cpus: frozenset[int] | None, prompts: list[list[int]]) -> None:
        stay_on(cpus)
        try:
            _read_prompts(engine, prompts, tests.row_tokens)
            start.wait()
            for _ in range(tests.row_tokens):
                engine.step()
        except BaseException:
            start.abort()  # nobody may wait for an engine that failed
            raise

    vocab_size = engines[0][0]._model.config.vocab_size
    prompts = rng.integers(0, vocab_size, (tests.rows, tests.row_prompt))
    shares = np.array_split(prompts, len(engines))
    threads = [
        threading.Thread(target=steps, args=(engine, cpus, share.tolist()))
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
    print(json.dumps({"version": ortolan.__version__}), flush=True)
    for _ in sys.stdin:
        print(json.dumps([_run(engines, tests, rng)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
