"""The Python in which a provider is measured: which one, and what is installed there.

ONNX Runtime's distributions replace each other, so most providers need an environment of their
own. `make test-providers` builds some under build/providers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import BenchError, UsageError

BUILT = Path("build/providers")
_PROBE_S = 120.0

# Runs in the other Python. What it says about itself is the last line: a library may print, too.
_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json, platform
try:
    ours = util.find_spec("ortolan.bench.compare") is not None
except ModuleNotFoundError:
    ours = False
found = {"python": platform.python_version(), "ortolan": ours}
versions = {}
for one in metadata.distributions():
    name = (one.metadata["Name"] or "").lower().replace("_", "-")
    if name.startswith("onnxruntime") and not name.startswith("onnxruntime-genai"):
        versions[name] = one.version
found["onnxruntime"] = versions
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Environment:
    """A Python. onnxruntime: the installed distributions of it, name to version."""

    python: Path
    version: str
    onnxruntime: Mapping[str, str]


def named_pythons(options: Sequence[str], providers: Sequence[str]) -> dict[str, Path]:
    """Provider to Python, of options NAME=PYTHON. Raises UsageError for what names neither."""
    found: dict[str, Path] = {}
    for text in options:
        name, equals, place = text.partition("=")
        if not equals or not place:
            raise UsageError(f"--env {text!r} is no NAME=PYTHON such as openvino=env/bin/python")
        if name not in providers:
            raise UsageError(f"--env {text}: --provider names {', '.join(providers)}, not {name}")
        if name in found:
            raise UsageError(f"--env names {name} twice")
        found[name] = Path(place)
    return found


def python_of(provider: str, named: Mapping[str, Path]) -> Path:
    """The one that --env names, else the one built for the provider, else the one running now."""
    if (python := named.get(provider)) is not None:
        return python / "bin" / "python" if python.is_dir() else python
    built = (BUILT / provider / "bin" / "python", BUILT / provider / "Scripts" / "python.exe")
    return next((path for path in built if path.is_file()), Path(sys.executable))


def probe(python: Path) -> Environment:
    """What is installed there. Raises BenchError if nothing of Ortolan could run in it."""
    try:
        done = subprocess.run(
            [str(python.absolute()), "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_S,
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{python} is no Python that answers: {error}") from error
    if found is None:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise BenchError(f"{python} is no Python that answers: {last[0]}")
    if not found["ortolan"]:
        raise BenchError(
            f"{python} has no Ortolan like this one; install it there: {python} -m pip install ."
        )
    return Environment(python, found["python"], found["onnxruntime"])
