"""What protects a server: encryption, keys, and what is open without one."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import UsageError
from ortolan.runtime.serve.callers import Keys
from ortolan.runtime.serve.config import ServeConfig
from ortolan.runtime.serve.tls import Tls, open_tls

# Word -> HTTP paths and full names of gRPC methods that tell nothing of anybody's requests.
OPEN_PATHS = {
    "health": frozenset(
        {
            "/health/live",
            "/health/ready",
            "/grpc.health.v1.Health/Check",
            "/grpc.health.v1.Health/Watch",
            "/inference.GRPCInferenceService/ServerLive",
            "/inference.GRPCInferenceService/ServerReady",
        }
    ),
    "metrics": frozenset({"/metrics"}),
    # The page has a field for the key, which what it sends from there needs.
    "page": frozenset({"/"}),
}

# What means nothing without the other.
_TOGETHER = (
    ("tls_cert", "tls_key"),
    ("tls_key", "tls_cert"),
    ("tls_client_ca", "tls_cert"),
    ("open_paths", "api_keys_file"),
)


@dataclass(frozen=True)
class Security:
    """tls: None for plain text. keys: None if none is needed. open_paths: what needs none."""

    tls: Tls | None = None
    keys: Keys | None = None
    open_paths: frozenset[str] = frozenset()

    def needs_key(self, path: str) -> bool:
        """Whether an HTTP path, or a gRPC method by its full name, is for key holders only."""
        return self.keys is not None and path not in self.open_paths


def open_security(config: ServeConfig) -> Security:
    """Read the files. Raises UsageError saying which cannot be used, and why."""
    for name, other in _TOGETHER:
        if getattr(config, name) is not None and getattr(config, other) is None:
            raise UsageError(f"{name} means nothing without {other}; give both")
    keys = None if config.api_keys_file is None else Keys(Path(config.api_keys_file))
    return Security(open_tls(config), keys, _open_paths(config.open_paths or ""))


def _open_paths(words: str) -> frozenset[str]:
    paths: frozenset[str] = frozenset()
    for word in filter(None, (word.strip() for word in words.split(","))):
        if word not in OPEN_PATHS:
            raise UsageError(
                f"open_paths has the word {ascii(word)[:66]}; known are {', '.join(OPEN_PATHS)}"
            )
        paths |= OPEN_PATHS[word]
    return paths


def reload_on_hangup(security: Security, say: Callable[[str], None]) -> Callable[[], None]:
    """On SIGHUP read keys and certificate again, and say what came of it; returns what ends that.

    What cannot be read leaves in force what is.
    """
    parts = [part for part in (security.keys, security.tls) if part is not None]
    if not parts or not hasattr(signal, "SIGHUP"):
        return lambda: None

    def reload() -> None:
        for part in parts:
            what = "file of keys" if isinstance(part, Keys) else "certificate"
            try:
                part.reload()
            except UsageError as error:
                say(f"SIGHUP: the {what} stays as it was: {error}")
            else:
                say(f"SIGHUP: the {what} was read again")

    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, reload)

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)

    return stop


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
