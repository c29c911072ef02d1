"""The README's provider table: prefill, decode and 16 rows on each provider, in the same rounds.

Usage: python benchmarks/providers.py BUNDLE [PROVIDER ...]; without any, cpu and openvino.
Environments are those of `make test-providers`; each ratio is a speed over the first provider's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

# The table's columns: phase, rows and context (of prefill, the prompt's length) of a case.
CASES = {
    "prefill 400": ("prefill", 1, 400),
    "decode": ("decode", 1, 128),
    "16 rows": ("decode", 16, 128),
}


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.argument("providers", nargs=-1)
@click.option("--repeat", default=5, show_default=True, help="Rounds.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Where packed weights are kept.")
def main(bundle: Path, providers: tuple[str, ...], repeat: int, cache_dir: Path | None) -> None:
    """Print the table's rows as Markdown."""
    command = [sys.executable, "-m", "ortolan", "bench", str(bundle)]
    command += ["--provider", ",".join(providers or ("cpu", "openvino")), "--output", "json"]
    command += ["--prompt", "400", "--batch", "1,16", "--context", "128", "--repeat", str(repeat)]
    if cache_dir is not None:
        command += ["--cache-dir", str(cache_dir)]
    document = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    print("| provider |", " | ".join(CASES), "|")
    print("| --- |", " | ".join("---" for _ in CASES), "|")
    for name, system in document["systems"].items():
        print(f"| {name} |", " | ".join(_cells(document["results"], name, system)), "|")
    machine = document["machine"]
    print(f"\n{document['date']}, {machine['cpu']}, {machine['cores']} cores, ", end="")
    print(f"{machine['busy_elsewhere_cores']:.1f} of them busy elsewhere")


def _cells(results: list[dict[str, Any]], name: str, system: dict[str, Any]) -> list[str]:
    if system["reason"]:
        return [system["reason"]] + [""] * (len(CASES) - 1)
    cells = []
    for phase, batch, context in CASES.values():
        found = [
            one
            for one in results
            if (one["system"], one["phase"], one["batch"]) == (name, phase, batch)
            and context in (one["context"], one["tokens"])
        ]
        if not found:
            cells.append("not measured")
            continue
        speed, ratio = found[0]["tokens_per_s"], found[0]["ratio"]
        cells.append(f"{_median(speed):.0f} tokens/s ({_median(ratio):.2f})")
    return cells


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


if __name__ == "__main__":
    main()
