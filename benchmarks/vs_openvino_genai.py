"""Ortolan against OpenVINO GenAI on the same GGUF file with the same number of threads.

OpenVINO GenAI reads GGUF files of Q4_0, Q4_K_M, Q8_0 and 16 bits by itself, without torch. It runs
in a process of its own, in the environment of --python. Each round runs it, then Ortolan. Its
prefill is the time to the first token; both sides choose tokens greedily, and ours makes text of
them as well.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from _common import Report, demo_checkpoint, make_with, ortolan_command, parser
from _other_python import OtherPython, check_installed, run_in_turn
from _ours import Ours, Tests, add_arguments

from ortolan.bench.peers.llama_cpp import BENCH, LlamaPrograms
from ortolan.errors import BenchError

QUANTIZE = "llama-quantize"
MODULE = "openvino_genai"
REMEDY = (
    "openvino-genai is not installed; pip install openvino-genai==2026.4.0 openvino==2026.4.0 into "
    "an environment, and give its Python as --python"
)


def make_files(folder: Path, args: argparse.Namespace) -> tuple[Path, Path]:
    """A Q4_0 file and our bundle of it in `folder`, made where they are missing.

    The file is the demo checkpoint's weights rounded once more, by llama-quantize, or --gguf.
    Each is made under another name first: one that is there is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gguf, bundle = args.gguf, folder.absolute() / "bundle"
    if gguf is None:
        gguf = folder.absolute() / "q4_0.gguf"
        if not gguf.exists():
            part = folder.absolute() / f"q4_0.part-{time.time_ns()}.gguf"
            programs = LlamaPrograms(args.llama_bin, (BENCH, QUANTIZE))
            programs.run(QUANTIZE, "--allow-requantize", demo_checkpoint(), part, "q4_0")
            part.rename(gguf)
    if not bundle.exists():
        make_with(ortolan_command("export", gguf.absolute(), bundle, "--no-report"))
    return gguf, bundle


def main() -> int:
    """Make what is missing, run the rounds, report."""
    args_parser = parser(__doc__, rounds=7, bundle=False)
    args_parser.add_argument("folder", type=Path, help="for files of 0.3 GB, which are kept")
    args_parser.add_argument("--gguf", type=Path, help="default: the demo checkpoint as Q4_0")
    args_parser.add_argument("--python", default=sys.executable, help="that has openvino-genai")
    args_parser.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="has llama-quantize")
    args_parser.add_argument(
        "--backend",
        choices=("SDPA", "PA"),
        default="PA",
        help="its attention; default: %(default)s, which takes less processor time here",
    )
    args_parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time of both processes, which a busy machine leaves alone; --threads 1",
    )
    add_arguments(args_parser)
    args = args_parser.parse_args()
    tests = Tests.read(args)
    report = Report(f"against OpenVINO GenAI, same file, {args.threads} threads each")
    try:
        check_installed(args.python, MODULE, REMEDY)
        gguf, bundle = make_files(args.folder, args)
        kind = "processor" if args.cpu_time else "wall"
        given = [str(gguf), str(args.threads), args.backend, kind]
        other = OtherPython("OpenVINO GenAI", args.python, "_openvino_child.py", given, tests)
        clock = time.process_time if args.cpu_time else time.perf_counter
        mine = Ours(bundle, args.threads, tests, clock)
        run_in_turn(report, other, mine, args.rounds)
    except BenchError as exc:
        report.skipped = str(exc)
        return report.finish(args.as_json)
    report.notes.append(f"openvino-genai {other.version}, attention {args.backend}, {kind} time")
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
