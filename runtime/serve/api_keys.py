"""The file of API keys."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortolan.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# What fits into a header as it is. Shorter ones can be guessed, also from their digests.
_KEY = re.compile(r"[!-~]{16,512}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_LARGEST_LIMIT = 10**12
_FIELDS = ("key", "sha256", "tenant", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True)
class ApiKey:
    """What a key's holder may do.

    sha256: the key's digest, 32 bytes. tenant: holders of keys with the same one share cached
    prompts. requests_per_minute, tokens_per_minute: None for no limit; tokens are those of
    prompts and answers.
    """

    name: str
    sha256: bytes
    tenant: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def read_keys(path: Path) -> dict[bytes, ApiKey]:
    """The keys of a TOML file by their digests, one table a key:

        [alice]
        sha256 = "..."              # or: key = "..."
        tenant = "acme"             # the name, unless given
        requests_per_minute = 60    # no limit, unless given
        tokens_per_minute = 20000

    Raises UsageError, which names the table and never holds a key.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"api_keys_file {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        # The parser's own text may quote a line, and with it a key.
        place = re.search(r"at line \d+", str(error))
        raise UsageError(
            f"api_keys_file {path} is not TOML{f', {place[0]}' if place else ''}; each key is a "
            'table, such as [alice] and below it sha256 = "..."'
        ) from None
    found: dict[bytes, ApiKey] = {}
    for name, table in tables.items():
        where = f"api_keys_file {path}: {ascii(name)[1:-1][:64]}"
        key = _key(name, table, where)
        if key.sha256 in found:
            raise UsageError(f"{where} has the key of {found[key.sha256].name}; make another one")
        found[key.sha256] = key
    if not found:
        raise UsageError(f"api_keys_file {path} holds no key, so nobody could call; add one")
    return found


def _key(name: str, table: Any, where: str) -> ApiKey:
    if not isinstance(table, dict):
        raise UsageError(f"{where} is no table; write [NAME] above what a key may do")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where} is no name; take up to 64 of A-Z a-z 0-9 . _ -")
    for field in table:
        if field not in _FIELDS:
            raise UsageError(f"{where}.{ascii(field)[1:-1][:64]} is unknown; known are {_listed()}")
    tenant = table.get("tenant", name)
    if not isinstance(tenant, str) or not _NAME.fullmatch(tenant):
        raise UsageError(f"{where}.tenant must be text: up to 64 of A-Z a-z 0-9 . _ -")
    return ApiKey(
        name,
        _digest(table, where),
        tenant,
        _limit(table, "requests_per_minute", where),
        _limit(table, "tokens_per_minute", where),
    )


def _digest(table: Mapping[str, Any], where: str) -> bytes:
    given = [name for name in ("key", "sha256") if name in table]
    if len(given) != 1:
        raise UsageError(f"{where} must have either key or sha256")
    value, plain = table[given[0]], given[0] == "key"
    if not isinstance(value, str) or not (_KEY if plain else _SHA256).fullmatch(value):
        wanted = "16 to 512 letters, digits and signs of ASCII" if plain else "64 digits of hex"
        raise UsageError(f"{where}.{given[0]} must be {wanted}; `openssl rand -hex 32` makes a key")
    return hashlib.sha256(value.encode()).digest() if plain else bytes.fromhex(value)


def _limit(table: Mapping[str, Any], field: str, where: str) -> int | None:
    value = table.get(field)
    if value is None or (type(value) is int and 1 <= value <= _LARGEST_LIMIT):
        return value
    raise UsageError(f"{where}.{field} must be a whole number from 1 to {_LARGEST_LIMIT}")


def _listed() -> str:
    return f"{', '.join(_FIELDS[:-1])} and {_FIELDS[-1]}"
