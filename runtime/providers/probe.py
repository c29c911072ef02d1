"""Whether a provider really works here: a product computed on it, in a process of its own.

That ONNX Runtime lists a provider says only that it was built in. Libraries may be missing, there
may be no device, and what is wrong with a driver may end the process: so it is another one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 120
_SIZE = 8
_MOST_SHOWN = 400
_SEE_LOG = ", as its log says"


@dataclass(frozen=True)
class Probed:
    """usable: it computed a product rightly. reason: why not. devices: those it has."""

    usable: bool
    reason: str = ""
    devices: tuple[str, ...] = ()


def probe(name: str, options: Mapping[str, Any] | None = None) -> Probed:
    """Try the provider of that name or plug-in library, with a user's options. Raises nothing."""
    asked = json.dumps({"name": name, "options": dict(options or {})})
    # -P: not what happens to lie in the current folder. The path, because it may have been changed.
    command = [sys.executable, "-P", "-c", _child(sys.path)]
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=_TIMEOUT_S,
            errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Probed(False, f"a first product was not there after {_TIMEOUT_S} s")
    except OSError as exc:
        return Probed(False, f"a process to try it in cannot be started ({exc})")
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        reason, devices = found["reason"], tuple(found["devices"])
    except (IndexError, ValueError, KeyError, TypeError):
        reason, devices = f"its process ended without an answer (exit status {done.returncode})", ()
    if reason is None:
        return Probed(True, devices=devices)
    return Probed(False, plain_reason(reason, done.stderr), devices)


def _child(path: list[str]) -> str:
    return (
        f"import sys; sys.path[:] = {path!r}\n"
        "from ortolan.runtime.providers.probe import answer\n"
        "sys.stdout.write('\\n' + answer(sys.stdin.read()))"
    )


def answer(asked: str) -> str:
    """What the child process says, as JSON: a reason or null, and devices."""
    request = json.loads(asked)
    devices: list[str] = []
    try:
        _try(request["name"], request["options"], devices)
    except Exception as exc:  # noqa: BLE001  (whatever stops it is the answer)
        return json.dumps({"reason": str(exc) or type(exc).__name__, "devices": devices})
    return json.dumps({"reason": None, "devices": devices})


def _try(name: str, options: Mapping[str, Any], devices: list[str]) -> None:
    import numpy as np
    import onnxruntime as ort

    from ortolan.errors import ProviderError
    from ortolan.runtime.engine.tiny_graphs import product_graph
    from ortolan.runtime.providers import find_provider

    provider = find_provider(name, ort, options)
    if provider.list_devices is not None:
        devices += provider.list_devices()
    devices += _listed(ort, provider.ort_name) if not devices else []
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    session = provider.open_session(ort, product_graph(), settings)
    a = np.arange(_SIZE * _SIZE, dtype=np.float32).reshape(_SIZE, _SIZE) % 5
    (out,) = session.run(None, {"a": a, "b": a + 1})
    if not np.allclose(out, a @ (a + 1)):
        raise ProviderError(f"{provider.ort_name} computes a product wrongly on this device")


def _listed(ort: Any, ort_name: str) -> list[str]:
    """The devices that ONNX Runtime (1.23 and later) lists for a provider."""
    if not hasattr(ort, "get_ep_devices"):
        return []
    return [
        f"{device.device.type.name} of {device.ep_vendor or device.device.vendor}"
        if device.device.vendor in ("", None)
        else f"{device.device.vendor} {device.device.type.name}"
        for device in ort.get_ep_devices()
        if device.ep_name == ort_name
    ]


def plain_reason(reason: str, log: str) -> str:
    """One line of what ONNX Runtime says, without colours and places in its source code.

    log: standard error of the process, which says what the exception leaves out.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in log.splitlines()]
    said = [line for line in lines if "[E:onnxruntime:" in line] or [
        line for line in lines if "cannot open shared object file" in line
    ]
    words = _without_source(reason)
    logged = "; ".join(dict.fromkeys(found for line in said if (found := _without_source(line))))
    if logged and logged not in words:
        # Provider.open_session can only point to the log, which is at hand here.
        points = _SEE_LOG in words
        words = words.replace(_SEE_LOG, f": {logged}") if points else f"{words}; {logged}"
    return words if len(words) <= _MOST_SHOWN else words[:_MOST_SHOWN] + " ..."


def _without_source(text: str) -> str:
    """What follows the last mark that ends a place or a kind of error."""
    line = " ".join(text.split())
    for mark in (r" was false\. ", r"\[ERROR\] ", r"\[ONNXRuntimeError\] : \d+ : \w+ : "):
        line = re.split(mark, line)[-1]
    # 2026-01-31 12:34:56.789 [E:onnxruntime:Default, file.cc:12 Function] ...
    line = re.sub(r"^.*\[[EW]:onnxruntime:[^\]]*\] ", "", line).removeprefix("Warning: ").strip()
    return re.sub(r"(?:/[\w.+-]+){2,}/([\w.+-]+\.so)", r"\1", line)
