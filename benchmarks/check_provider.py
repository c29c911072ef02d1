"""Whether a provider computes what the CPU does, and how fast, on a machine that has one.

Runs where Ortolan and a distribution of ONNX Runtime are installed, on a kit that
make_check_kit.py made; cuda_check.sh and directml_check.ps1 start it. It imports nothing else of
this folder. Every step is a process of its own, so that a driver that crashes is a line of the
report, and has only the time that is left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

CAPTURE = {"enable_cuda_graph": "1"}
PARITY_S = 150.0
_LAST_WORDS = 300


@dataclass(frozen=True)
class Step:
    """One process: what the report calls it, its command, whether a failure fails the check."""

    name: str
    command: list[str]
    kind: str  # "parity" or "speed"


def main() -> int:
    """Run the steps while there is time; 1 if a result was wrong or nothing could be compared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("kit", type=Path)
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--seconds", type=float, default=450, help="for all of it")
    parser.add_argument("--batch", default="1,4,16", help="rows that decode together")
    parser.add_argument("--prompt", default="128,400", help="lengths of prompts")
    parser.add_argument("--context", default="128", help="tokens that rows hold")
    parser.add_argument("--repeat", default="5", help="rounds of the timings")
    parser.add_argument("--report", type=Path, help="where the results go as JSON")
    parser.add_argument("--parity", type=Path, help=argparse.SUPPRESS)  # a step: one bundle
    parser.add_argument("--options", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--accuracy", default="exact", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parity is not None:
        print(json.dumps(parity(args.kit, args.parity.name, args)))
        return 0
    until_s = time.monotonic() + args.seconds
    found: dict[str, Any] = {"provider": args.provider, "machine": machine(), "steps": []}
    for line in (f"{name}: {value}" for name, value in found["machine"].items()):
        print(line)
    for step in steps(args):
        result = run(step, until_s)
        found["steps"].append(result)
        print(described(step, result), flush=True)
    compared = [one for one in found["steps"] if one["kind"] == "parity" and "outcomes" in one]
    wrong = [one for one in found["steps"] if one["kind"] == "parity" and one["failures"]]
    found["ok"] = bool(compared) and not wrong
    if args.report is not None:
        args.report.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{args.provider}: " + ("PASS" if found["ok"] else "FAIL"))
    return int(not found["ok"])


def machine() -> dict[str, Any]:
    """What the report has to say of where it was made."""
    versions = {
        one.metadata["Name"]: one.version
        for one in metadata.distributions()
        if (one.metadata["Name"] or "").startswith(("onnxruntime", "ortolan", "numpy"))
    }
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **dict(sorted(versions.items())),
        "devices": "; ".join(_devices()) or "nvidia-smi shows none",
    }


def _devices() -> list[str]:
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def steps(args: argparse.Namespace) -> list[Step]:
    """Parity first, of every bundle, then with recorded decode; then speed of the largest."""
    bundles = sorted((args.kit / "bundles").iterdir(), key=_bytes)
    again = [sys.executable, str(Path(__file__)), str(args.kit), "--provider", args.provider]
    names = {"": {}, ", decode recorded": CAPTURE} if captures(args.provider) else {"": {}}
    made = []
    for suffix, options in names.items():
        for bundle in bundles:
            for accuracy in ("exact", "default"):
                command = [*again, "--parity", str(bundle), "--accuracy", accuracy]
                command += ["--options", json.dumps(options)]
                made.append(Step(f"{bundle.name}, {accuracy}{suffix}", command, "parity"))
    for suffix, options in names.items():
        made.append(Step(f"{bundles[-1].name}{suffix}", bench(args, bundles[-1], options), "speed"))
    return made


def captures(provider: str) -> bool:
    """Whether the provider can record decode calls."""
    from ortolan.runtime.providers import load_provider

    return load_provider(provider).capabilities.graphs_captured


def bench(args: argparse.Namespace, bundle: Path, options: Mapping[str, str]) -> list[str]:
    """`ortolan bench` of this provider in this environment."""
    given = [f"--provider-option={name}={value}" for name, value in options.items()]
    return [
        *(sys.executable, "-P", "-m", "ortolan", "bench", str(bundle), "--output", "json"),
        *("--provider", args.provider, "--env", f"{args.provider}={sys.executable}", *given),
        *("--batch", args.batch, "--prompt", args.prompt, "--context", args.context),
        *("--repeat", args.repeat, "--cache-dir", str(args.kit / "cache")),
    ]


def _bytes(bundle: Path) -> int:
    return sum(path.stat().st_size for path in bundle.iterdir() if path.is_file())


def run(step: Step, until_s: float) -> dict[str, Any]:
    """The step's JSON, or in `failures` why there is none."""
    began_s = time.monotonic()
    result: dict[str, Any] = {"name": step.name, "kind": step.kind, "failures": []}
    left_s = until_s - began_s
    if left_s <= 1:
        # Nothing was found to be wrong, but nobody may read it as right either.
        return {**result, "failures": ["not run: the time is over"], "seconds": 0.0}
    try:
        done = subprocess.run(
            step.command,
            capture_output=True,
            text=True,
            check=False,
            timeout=min(left_s, PARITY_S) if step.kind == "parity" else left_s,
        )
        lines = done.stdout.strip().splitlines()
        found = json.loads(done.stdout if step.kind == "speed" else lines[-1])
        result |= found
        if step.kind == "speed":
            reasons = [system["reason"] for system in found["systems"].values()]
            result["failures"] = [reason for reason in reasons if reason]
    except subprocess.TimeoutExpired:
        result["failures"] = ["stopped: it took too long"]
    except (ValueError, IndexError):
        said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        result["failures"] = [f"exit status {done.returncode}: {said[:_LAST_WORDS]}"]
    return {**result, "seconds": time.monotonic() - began_s}


def parity(kit: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compare one bundle with what the CPU gave for it where the kit was made."""
    import numpy as np

    from ortolan.runtime.bundle import Bundle
    from ortolan.runtime.engine.opening import open_engine
    from ortolan.runtime.params import EngineConfig
    from ortolan.runtime.reference import LIMITS, Expected, compare
    from ortolan.runtime.text.no_tokenizer import open_tokenizer

    plain = json.loads((kit / "references" / f"{name}.json").read_text(encoding="utf-8"))
    with np.load(kit / "references" / f"{name}.npz") as logits:
        cases = [Expected(**{**case, "logits": logits[case["name"]]}) for case in plain]
    bundle = Bundle.open(kit / "bundles" / name)
    longest = max(len(case.prompt_ids) + len(case.greedy_ids) for case in cases)
    config = EngineConfig(
        provider=args.provider,
        provider_options=json.loads(args.options),
        accuracy=args.accuracy,
        cache_dir=str(kit / "cache"),
        max_slots=4,
        max_context=min(bundle.manifest.model.max_context, longest + 2),
    )
    engine = open_engine(bundle, config, open_tokenizer(bundle))
    outcomes = compare(engine, cases, LIMITS[config.accuracy])
    failures = [f"{one.name}: {sentence}" for one in outcomes for sentence in one.failures]
    return {"outcomes": [asdict(one) for one in outcomes], "failures": failures}


def described(step: Step, result: Mapping[str, Any]) -> str:
    """Lines of the report."""
    head = f"{step.kind} {step.name} ({result['seconds']:.0f} s): "
    if result["failures"]:
        return head + "FAIL: " + "; ".join(result["failures"])
    if step.kind == "parity":
        outcomes: Sequence[Mapping[str, Any]] = result["outcomes"]
        error = max(one["max_abs_error"] for one in outcomes)
        kl = max(one["kl"] for one in outcomes)
        equal, owed = (sum(one[f"greedy_{name}"] for one in outcomes) for name in ("equal", "owed"))
        return head + f"ok, error {error:.1e}, KL {kl:.1e}, greedy tokens {equal} of {owed} owed"
    lines = [
        f"  {row['phase']} {row['batch']} x {row['tokens']} at {row['context']}: "
        f"{row['tokens_per_s']:.0f} tokens/s ({row['time_ms']['median']:.2f} ms)"
        for row in result["results"]
    ]
    warned = [f"  warned: {text}" for one in result["systems"].values() for text in one["warnings"]]
    return "\n".join([head + "ok", *warned, *lines])


if __name__ == "__main__":
    sys.exit(main())
