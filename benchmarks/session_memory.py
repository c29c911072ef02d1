"""Memory of a process that holds the decode and prefill sessions, against decode alone.

Both run from the packed cache, which the sessions map, and have made one step with each session.
Compared is PSS (memory mapped by several processes is shared out among them), of one process at a
time, on a packed cache that no other process has mapped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import onnxruntime as ort
from _common import Check, Report, Series, alternated, parser

from ortolan.graphs.contract import DECODE, SAMPLE
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.kv_cache import KvCache
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.packed import packed_graphs
from ortolan.runtime.engine.sessions import (
    SessionSet,
    open_packed_graph,
    open_sessions,
    open_source_graph,
)
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import find_provider

BOUND = 1.15
ONE, BOTH = "decode", "decode and prefill"
_FIELDS = {"Pss:": "pss", "Rss:": "rss", "Pss_Anon:": "anonymous"}


def memory_mb() -> dict[str, float]:
    """PSS, RSS and PSS of anonymous memory of this process, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    words = [line.split() for line in lines]
    return {_FIELDS[w[0]]: int(w[1]) * 1024 / 1e6 for w in words if w[0] in _FIELDS}


def hold(args: argparse.Namespace) -> None:
    """Open the session or sessions, run one step with each, print what the process takes."""
    bundle = Bundle.open(args.bundle)
    use_threads(args.threads)
    provider = find_provider("cpu", ort)
    packed = packed_graphs(bundle, provider, "default", args.cache_dir)
    if packed is None:
        sys.exit("the packed cache could not be written")
    if args.hold == BOTH:
        sessions = open_sessions(bundle, provider, "default", packed)
    else:
        decode = open_packed_graph(packed[DECODE], provider)
        sample = open_source_graph(bundle, SAMPLE, provider, "default")
        sessions = SessionSet(decode, decode, sample, ragged=False)  # prefill is never run
    config = bundle.manifest.model
    cache = KvCache(config, 1, config.max_context)
    model = Model(config, sessions, cache, 1)
    if args.hold == BOTH:
        model.prefill(0, [list(range(args.chunk))], [0], [[args.chunk - 1]])
    else:  # as much KV as the prefill step writes, which is no session's memory
        for layer in range(config.num_layers):
            for part in (0, 1):
                cache.rows(layer, part, 0, 1)[:, :, : args.chunk] = 0.5
    model.decode(0, [1], [args.chunk])
    print(json.dumps(memory_mb()))


def measure(args: argparse.Namespace, what: str, cache_dir: str) -> dict[str, float]:
    """Memory of a new process that holds `what`."""
    command = [sys.executable, __file__, str(args.bundle), "--hold", what]
    command += ["--threads", str(args.threads), "--chunk", str(args.chunk)]
    done = subprocess.run(
        [*command, "--cache-dir", cache_dir], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Measure both in turn and report."""
    args_parser = parser(__doc__, rounds=5)
    args_parser.add_argument(
        "--chunk",
        type=int,
        default=EngineConfig().prefill_chunk,
        help="tokens of the prefill step; default: %(default)s",
    )
    args_parser.add_argument("--hold", choices=[ONE, BOTH], help=argparse.SUPPRESS)
    args_parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    args = args_parser.parse_args()
    if args.hold:
        hold(args)
        return 0
    report = Report("memory of decode and prefill sessions together, against decode alone")
    if not Path("/proc/self/smaps_rollup").exists():
        report.skipped = "this system has no /proc/self/smaps_rollup"
        return report.finish(args.as_json)
    found: dict[str, list[dict[str, float]]] = {ONE: [], BOTH: []}
    with tempfile.TemporaryDirectory() as cache_dir:
        measure(args, ONE, cache_dir)  # builds the packed cache
        for turn in range(args.rounds):
            for what in alternated([ONE, BOTH], turn):
                found[what].append(measure(args, what, cache_dir))
    medians = {}
    for what, taken in found.items():
        for kind in _FIELDS.values():
            series = Series(f"{what}, {kind}", "MB", [one[kind] for one in taken])
            report.series.append(series)
            medians[what, kind] = series.median
    ratio = medians[BOTH, "pss"] / medians[ONE, "pss"]
    report.checks.append(Check("PSS of both against one", ratio, "x", BOUND, at_least=False))
    report.notes.append(f"the prefill step read {args.chunk} tokens; both sides hold as much KV")
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
