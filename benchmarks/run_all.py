"""Every benchmark in turn, then one table of what they found."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = (
    "vs_llama_cpp",
    "vs_bare_loop",
    "rows_vs_bare_loop",
    "continuous_batching",
    "long_prompt_gap",
    "cached_prefix",
    "cold_and_warm_start",
    "session_memory",
    "plan_memory",
    "export_time",
)


def run(script: str, bundle: Path, more: list[str]) -> dict[str, Any]:
    """What one script found; a script that breaks is a result, too."""
    path = Path(__file__).with_name(f"{script}.py")
    command = [sys.executable, str(path), str(bundle), "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {"failed": f"exit status {done.returncode}: {last[0]}"}
    return found


def rows(script: str, found: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Table rows: script, what, value, bound, verdict."""
    if reason := found.get("failed"):
        return [(script, reason, "", "", "FAIL")]
    if reason := found["skipped"]:
        return [(script, reason, "", "", "SKIP")]
    lines = []
    for check in found["checks"]:
        if check["bound"] is None:
            continue
        sign = ">=" if check["at_least"] else "<="
        value, bound = f"{check['value']:.3f}{check['unit']}", f"{check['bound']:g}{check['unit']}"
        verdict = "PASS" if check["passed"] else "MISS"
        lines.append((script, check["what"], value, f"{sign} {bound}", verdict))
    return lines


def main() -> int:
    """Run all, or the named ones; 1 if a bound was missed or a script broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="SCRIPT")
    parser.add_argument("--rounds", type=int, help="the same number for all; default: their own")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    more = [] if args.rounds is None else ["--rounds", str(args.rounds)]
    results: dict[str, dict[str, Any]] = {}
    for script in args.only:
        print(f"running {script} ...", file=sys.stderr)
        results[script] = run(script, args.bundle, more)
    table = [row for script, found in results.items() for row in rows(script, found)]
    if args.as_json:
        print(json.dumps(results))
    else:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())
        for script, found in results.items():
            if machine := found.get("machine"):
                print(f"{script}: " + ", ".join(f"{k}: {v}" for k, v in machine.items()))
    return int(any(row[-1] in ("MISS", "FAIL") for row in table))


if __name__ == "__main__":
    sys.exit(main())
