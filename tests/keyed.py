"""Keys of three people in two tenants, and what servers and clients do with them."""

from __future__ import annotations

from pathlib import Path

from ortolan.runtime.serve.config import ServeConfig
from ortolan.runtime.serve.security import Security, open_security

ALICE, ADA, BOB = "alice-key-of-tenant-acme", "ada-key-of-tenant-acme-", "bob-key-of-his-own-tenant"
KEYS = f"""
[alice]
key = "{ALICE}"
tenant = "acme"

[ada]
key = "{ADA}"
tenant = "acme"

[bob]
key = "{BOB}"
"""


def secured(file: Path, open_paths: str | None = None) -> Security:
    return open_security(ServeConfig(api_keys_file=str(file), open_paths=open_paths))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
