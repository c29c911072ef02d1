"""Ortolan against three other engines, one after the other: the table of docs/benchmarks.md.

Runs vs_llama_cpp.py on the published Q4_1 file and on the same weights as Q4_0, vs_genai.py and
vs_openvino_genai.py, and prints their medians as Markdown. Whoever is not installed is a row that
says so. Needs a quiet machine: what else ran is printed below the table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Match:
    """A row's name, and the script that fills it with what it is given."""

    name: str
    script: str
    given: list[str]


def matches(args: argparse.Namespace) -> list[Match]:
    """Every comparison. What vs_openvino_genai.py makes, the Q4_0 row of llama.cpp reads."""
    folder: Path = args.folder.absolute()
    llama = ["--llama-bin", str(args.llama_bin)] if args.llama_bin else []
    gguf = ["--gguf", str(args.gguf)] if args.gguf else []
    openvino, genai = folder / "openvino", folder / "genai"
    openvino_given = [str(openvino), "--python", args.openvino_python, *llama]
    same = [str(openvino / "bundle"), "--gguf", str(openvino / "q4_0.gguf")]
    genai_given = [str(genai), "--python", args.genai_python, *gguf]
    return [
        Match("llama.cpp, the published Q4_1", "vs_llama_cpp", [str(args.bundle), *gguf, *llama]),
        Match("OpenVINO GenAI, Q4_0", "vs_openvino_genai", openvino_given),
        Match("llama.cpp, Q4_0", "vs_llama_cpp", [*same, *llama]),
        Match("onnxruntime-genai, int4 block 32", "vs_genai", genai_given),
    ]


def run(match: Match, rounds: int, threads: int) -> dict[str, Any]:
    """What the script found; `skipped` where it could not run."""
    common = ["--json", "--rounds", str(rounds), "--threads", str(threads)]
    done = subprocess.run(
        [sys.executable, str(HERE / f"{match.script}.py"), *match.given, *common],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {"skipped": f"exit status {done.returncode}: {last[0]}"}
    return found


def row(match: Match, found: dict[str, Any]) -> str:
    """A line of the table: for each test the median ratio, and between what the rounds lay."""
    if found["skipped"] is not None:
        return f"| {match.name} | not run: {found['skipped']} | | |"
    series = [one["values"] for one in found["series"]]
    # Ours and theirs follow each other, test by test.
    cells = []
    for ours, theirs in zip(series[::2], series[1::2], strict=True):
        ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
        median = ratios[len(ratios) // 2]
        cells.append(f"{median:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return f"| {match.name} | {' | '.join(cells)} |"


def main() -> int:
    """Run all; 1 if nothing could be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("bundle", type=Path, help="of the published file: ortolan export smollm2")
    parser.add_argument("folder", type=Path, help="for files of 1.1 GB, which are kept")
    parser.add_argument("--gguf", type=Path, help="default: the demo checkpoint")
    parser.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="llama.cpp's programs")
    parser.add_argument("--genai-python", default=sys.executable, help="has onnxruntime-genai")
    parser.add_argument("--openvino-python", default=sys.executable, help="has openvino-genai")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print("| Ortolan against | prefill of 400 | decode | 16 rows |\n| --- | --- | --- | --- |")
    machines = []
    for match in matches(args):
        print(f"running {match.name} ...", file=sys.stderr)
        found = run(match, args.rounds, args.threads)
        print(row(match, found), flush=True)
        if machine := found.get("machine"):
            machines.append({**machine, "notes": "; ".join(found["notes"])})
    print(f"\n{datetime.date.today().isoformat()}, {args.threads} threads, {args.rounds} rounds")
    for machine in machines:
        print("; ".join(f"{name} {value}" for name, value in machine.items() if value))
    return int(not machines)


if __name__ == "__main__":
    sys.exit(main())
