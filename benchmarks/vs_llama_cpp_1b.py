"""Ortolan against llama.cpp on a 1B model of random weights: int4 blocks of 128 against Q4_0.

Both sides come from the same float weights; checkpoints and bundle are made in FOLDER the first
time. --table says how the table of tokens, a fifth of this model and its head too, is stored:
`4bit` as everything else on both sides; `wide` as llama-quantize does it (Q6_K), and int8 here.
What a step has to read and how fast memory can be read give the bound of decode.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from _bandwidth import bytes_per_token, read_bandwidth
from _common import Check, Report, Series, make_with, ortolan_command, parser
from _gguf_bytes import bytes_per_token as gguf_bytes_per_token
from _random_llama import SHAPES
from make_checkpoint import make
from vs_llama_cpp import Bounds, add_arguments, compare

import ortolan
from ortolan.bench.peers.llama_cpp import BENCH, LlamaPrograms, find_program
from ortolan.errors import BenchError

BOUNDS = Bounds(prefill=1.2, decode=1.0, rows=1.1)
QUANTIZE = "llama-quantize"
FRACTION_BOUND = 0.8
WEIGHTS = ("--weights", "int4", "--block-size", 128, "--symmetric")
CONTEXT = 4096
TABLES = {"4bit": (), "wide": ("--embedding", "int8", "--lm-head", "int8")}


class Files:
    """The checkpoints and the bundle in a folder, made where they are missing.

    Each is made under another name first: one that is there is whole.
    """

    def __init__(self, folder: Path, shape: str, layers: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        known = SHAPES[shape]
        self._shape = known if layers is None else replace(known, layers=layers)
        self._stem = folder / (shape if layers is None else f"{shape}-{layers}")

    def checkpoint(self, file_format: str) -> Path:
        """A folder (safetensors) or a GGUF file."""
        path = self._path(file_format)
        if not path.exists():
            part = path.with_name(f"{path.name}.part-{time.time_ns()}")
            make(part, self._shape, file_format)
            part.rename(path)
        return path

    def llama_quantized(self, programs: LlamaPrograms) -> Path:
        """Q4_0 as llama-quantize makes it."""
        path = self._path("llama-quantize")
        if not path.exists():
            part = path.with_name(f"{path.name}.part-{time.time_ns()}")
            programs.run(QUANTIZE, self.checkpoint("gguf-bf16"), part, "Q4_0")
            part.rename(path)
        return path

    def bundle(self, table: str) -> Path:
        """Our export of the folder."""
        path = self._path(f"bundle-{table}")
        if not path.exists():
            source = self.checkpoint("safetensors")
            options = (*WEIGHTS, *TABLES[table], "--max-context", min(CONTEXT, self._shape.context))
            make_with(ortolan_command("export", source, path, *options, "--no-report"))
        return path

    def _path(self, suffix: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}-{suffix}").absolute()


def bound_of_decode(
    report: Report, sides: list[tuple[str, int, Series]], tokens: int, bandwidths: list[float]
) -> None:
    """What each side reads per token, and the share of the bandwidth that its decode reached.

    A round's share is of what was measured in that round. Ours, the first, has a bound.
    """
    report.series.append(Series("memory read by numpy", "GB/s", [b / 1e9 for b in bandwidths]))
    for name, size, seconds in sides:
        shares = [size * tokens / s / b for s, b in zip(seconds.values, bandwidths, strict=True)]
        report.checks += [
            Check(f"{name}: weights read per token", size / 1e6, " MB"),
            Check(
                f"{name}: share of the bandwidth that decode reached",
                statistics.median(shares),
                bound=FRACTION_BOUND if name == "ortolan" else None,
            ),
        ]


def main() -> int:
    """Make what is missing, run the rounds, report."""
    args_parser = parser(__doc__, rounds=5, bundle=False)
    args_parser.add_argument("folder", type=Path, help="for files of 7 GB, which are kept")
    args_parser.add_argument("--table", choices=TABLES, default="4bit", help="default: %(default)s")
    args_parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    args_parser.add_argument("--layers", type=int, help="default: as the model has")
    add_arguments(args_parser)
    args = args_parser.parse_args()
    report = Report(
        f"{args.shape} shape, int4 blocks of 128 against llama.cpp Q4_0, tables {args.table}, "
        f"{args.threads} threads each"
    )
    files = Files(args.folder, args.shape, args.layers)
    bandwidths: list[float] = []
    try:
        if args.table == "wide":
            with closing(LlamaPrograms(args.llama_bin, (BENCH, QUANTIZE))) as programs:
                gguf = files.llama_quantized(programs)
        else:
            find_program(BENCH, args.llama_bin)  # before minutes of work
            gguf = files.checkpoint("gguf-q4_0")
        bundle = files.bundle(args.table)
        ours, theirs = compare(
            *(report, bundle, gguf, args, BOUNDS),
            each_round=lambda: bandwidths.append(read_bandwidth(args.threads)),
        )
        size = bytes_per_token(ortolan.Manifest.read(bundle))
        sides = [("ortolan", size, ours), ("llama.cpp", gguf_bytes_per_token(gguf), theirs)]
        bound_of_decode(report, sides, args.tokens, bandwidths)
    except BenchError as exc:
        report.skipped = str(exc)
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
