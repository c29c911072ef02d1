"""Peak memory of exporting a checkpoint larger than what may be held.

Makes a synthetic bfloat16 checkpoint in Hugging Face form (--gigabytes; 6 for the claim), exports
it in a process of its own, and compares that process's largest resident size with the float32 size
of the checkpoint's largest tensor. Needs twice the checkpoint's size on disk, three times with
`--weights float32`.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from _common import Check, Report, Series, ortolan_command, parser
from _random_llama import SHAPES, tensors
from make_checkpoint import make

BOUND_MB = 400.0
SHAPE = SHAPES["mistral-7b"]
BF16_BYTES, FLOAT_BYTES = 2, 4


def main() -> int:
    """Make, export, measure, report."""
    arguments = parser(__doc__, rounds=1, bundle=False)
    arguments.add_argument("--gigabytes", type=float, default=6.0, help="size of the checkpoint")
    arguments.add_argument("--folder", type=Path, help="where there is room for twice that")
    arguments.add_argument("--weights", default="source", help="as of `ortolan export`")
    args = arguments.parse_args()
    report = Report("peak memory of an export over its largest tensor in float32")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name) / "checkpoint"
        size = make(folder, replace(SHAPE, layers=layers_of(args.gigabytes)), "safetensors")
        bundle_size = size * (2 if args.weights == "float32" else 1)
        if shutil.disk_usage(name).free < 1.1 * bundle_size:
            report.skipped = f"a bundle of {bundle_size / 1e9:.1f} GB has no room in {name}"
            return report.finish(args.as_json)
        command = ortolan_command(
            *("export", folder, Path(name) / "bundle"), *("--weights", args.weights, "--no-report")
        )
        began_s = time.perf_counter()
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began_s
        if done.returncode != 0:
            sys.exit(f"ortolan export exited with {done.returncode}: {done.stderr}")
    # The largest of all children: there was only the one.
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    largest_mb = max(tensor.size for tensor in tensors(SHAPE, 0)) * FLOAT_BYTES / 1e6
    report.series += [
        Series("checkpoint", "MB", [size / 1e6]),
        Series("largest tensor in float32", "MB", [largest_mb]),
        Series("peak resident size", "MB", [peak_mb]),
        Series("export", "s", [seconds]),
    ]
    over = Check(
        "peak over the largest tensor", peak_mb - largest_mb, " MB", BOUND_MB, at_least=False
    )
    report.checks = [over]
    return report.finish(args.as_json)


def layers_of(gigabytes: float) -> int:
    """Layers of a checkpoint of about that size; at least one."""
    none, one = (
        sum(tensor.size for tensor in tensors(replace(SHAPE, layers=layers), 0)) * BF16_BYTES
        for layers in (0, 1)
    )
    return max(1, round((gigabytes * 1e9 - none) / (one - none)))


if __name__ == "__main__":
    sys.exit(main())
