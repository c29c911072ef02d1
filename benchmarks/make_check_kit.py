"""A folder to carry to a machine with another provider: bundles, the CPU's results, the checks.

    python benchmarks/make_check_kit.py build/check-kit build/smollm2 [BUNDLE ...]

In it: bundles/NAME, references/NAME.json and .npz (what the CPU gives with float32 activations),
check_provider.py, cuda_check.sh, directml_check.ps1, and in wheels/ Ortolan itself. --wheels adds
what it needs beside ONNX Runtime, for --platform and --python-version, for a machine without a
network; the ONNX Runtime of that machine is not in it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ortolan.graphs.manifest import PACKED_NAME
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.reference import expected_by_cpu
from ortolan.runtime.text.no_tokenizer import open_tokenizer

HERE = Path(__file__).parent
CARRIED = ("check_provider.py", "cuda_check.sh", "directml_check.ps1")
NEEDED = ("numpy", "tokenizers", "jinja2", "click", "rich")


def add_bundle(kit: Path, path: Path) -> None:
    """Copy a bundle, and write what the CPU makes of it beside it."""
    target = kit / "bundles" / path.name
    shutil.rmtree(target, ignore_errors=True)
    # Packed graphs are one processor's.
    shutil.copytree(path, target, ignore=shutil.ignore_patterns(PACKED_NAME))
    bundle = Bundle.open(path)
    cases = expected_by_cpu(bundle, EngineConfig(), open_tokenizer(bundle))
    references = kit / "references"
    references.mkdir(parents=True, exist_ok=True)
    np.savez(references / f"{path.name}.npz", **{case.name: case.logits for case in cases})
    plain = [{**asdict(case), "logits": None} for case in cases]
    (references / f"{path.name}.json").write_text(json.dumps(plain), encoding="utf-8")


def add_wheels(kit: Path, args: argparse.Namespace) -> None:
    """Ortolan's own wheel; with --wheels, those of the packages that it needs."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels = kit / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, HERE.parent], check=True)
    if args.wheels:
        where = ["--only-binary=:all:", "--dest", wheels]
        for platform in args.platform or ():
            where += ["--platform", platform]
        if args.python_version:
            where += ["--python-version", args.python_version]
        subprocess.run([*pip, "download", *where, *NEEDED], check=True)


def main() -> int:
    """Make the kit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kit", type=Path)
    parser.add_argument("bundles", type=Path, nargs="+", help="the largest one is timed")
    parser.add_argument("--no-wheel", action="store_true", help="leave Ortolan's own out, too")
    parser.add_argument("--wheels", action="store_true", help="the packages that it needs as well")
    parser.add_argument("--platform", action="append", help="as pip download takes it")
    parser.add_argument("--python-version", help="the same")
    args = parser.parse_args()
    args.kit.mkdir(parents=True, exist_ok=True)
    for path in args.bundles:
        print(f"{path}: asking the CPU", file=sys.stderr)
        add_bundle(args.kit, path)
    for name in CARRIED:
        shutil.copy2(HERE / name, args.kit / name)
    if not args.no_wheel:
        add_wheels(args.kit, args)
    print(f"{args.kit} is ready: copy it, and run in it: bash cuda_check.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
