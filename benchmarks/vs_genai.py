"""Ortolan against onnxruntime-genai: one checkpoint, int4 blocks of 32 on both sides.

The weights are those of a GGUF file (the demo checkpoint's), written as a Hugging Face folder in
float32, and each side rounds them with its own exporter, the head too. genai runs in a process of
its own, in the environment of --python; its builder needs torch and transformers there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from _common import (
    Report,
    demo_checkpoint,
    make_with,
    ortolan_command,
    parser,
)
from _gguf_folder import write_folder
from _other_python import OtherPython, check_installed, run_in_turn
from _ours import Ours, Tests, add_arguments

from ortolan.errors import BenchError

BOUND = 1.0
BLOCK_SIZE = 32
WEIGHTS = ("--weights", "int4", "--block-size", BLOCK_SIZE, "--symmetric")
BUILDER = ("-p", "int4", "-e", "cpu", "--extra_options")
REMEDY = (
    "onnxruntime-genai is not installed; pip install onnxruntime-genai torch transformers into an "
    "environment, and give its Python as --python"
)
BUILDER_OPTIONS = (f"block_size={BLOCK_SIZE}", "accuracy_level=4", "shared_embeddings=true")


def make_files(folder: Path, args: argparse.Namespace) -> tuple[Path, Path]:
    """Our bundle and genai's model in `folder`, made where they are missing.

    Each is made under another name first: one that is there is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, bundle, genai = (folder.absolute() / name for name in ("float32", "bundle", "genai"))
    if not source.exists():
        part = folder / f"float32.part-{time.time_ns()}"
        write_folder(args.gguf or demo_checkpoint(), part)
        part.rename(source)
    if not bundle.exists():
        make_with(ortolan_command("export", source, bundle, *WEIGHTS, "--no-report"))
    if not genai.exists():
        part = folder.absolute() / f"genai.part-{time.time_ns()}"
        builder = [args.python, "-m", "onnxruntime_genai.models.builder"]
        where = ["-i", str(source), "-o", str(part), "-c", str(part / "cache")]
        make_with([*builder, *where, *BUILDER, *BUILDER_OPTIONS])
        shutil.rmtree(part / "cache", ignore_errors=True)
        part.rename(genai)
    _set_threads(genai / "genai_config.json", args.threads)
    return bundle, genai


def _set_threads(path: Path, threads: int) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config, indent=4), encoding="utf-8")


def main() -> int:
    """Make what is missing, run the rounds, report."""
    args_parser = parser(__doc__, rounds=7, bundle=False)
    args_parser.add_argument("folder", type=Path, help="for files of 0.8 GB, which are kept")
    args_parser.add_argument("--gguf", type=Path, help="default: the demo checkpoint")
    args_parser.add_argument("--python", default=sys.executable, help="that has onnxruntime-genai")
    add_arguments(args_parser)
    args = args_parser.parse_args()
    tests = Tests.read(args)
    report = Report(f"against onnxruntime-genai, int4 block {BLOCK_SIZE}, {args.threads} threads")
    try:
        check_installed(args.python, "onnxruntime_genai", REMEDY)
        bundle, genai = make_files(args.folder, args)
        given = [str(genai)]
        theirs_side = OtherPython("onnxruntime-genai", args.python, "_genai_child.py", given, tests)
        ours_side = Ours(bundle, args.threads, tests)
        run_in_turn(report, theirs_side, ours_side, args.rounds, BOUND)
    except BenchError as exc:
        report.skipped = str(exc)
        return report.finish(args.as_json)
    report.notes.append(f"onnxruntime-genai {theirs_side.version}")
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
