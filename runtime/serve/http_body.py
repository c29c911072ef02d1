"""A request's body: bounded before it is read, bounded again before it is parsed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.types import Receive

from ortolan.runtime.serve.http_errors import ApiError

# A string, which may be unfinished, or a bracket. Possessive, so that no text takes long.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
# From here on parsing and checking take milliseconds, which other streams would wait for.
LARGE_BYTES = 32 << 10


@dataclass(frozen=True)
class HttpLimits:
    """Bounds on what one request may bring.

    body_bytes: of the body. nesting: how deep brackets may go. choices: most answers of one
    request, over all its prompts.
    """

    body_bytes: int = 4 << 20
    nesting: int = 32
    choices: int = 128


class ClientGoneError(Exception):
    """The client left before its request was complete; nobody is there to be told."""


async def read_body(headers: Headers, receive: Receive, limits: HttpLimits) -> bytes:
    """A body that says it is JSON and is not too large. Raises ApiError, ClientGoneError."""
    _check_headers(headers, limits)
    return await _read(receive, limits)


def _check_headers(headers: Headers, limits: HttpLimits) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also what keeps a web page from posting here without asking first.
        raise ApiError(415, "send the body with Content-Type: application/json", "content_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body without Content-Encoding", "content_encoding")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limits.body_bytes:
        raise _too_large(limits)


async def _read(receive: Receive, limits: HttpLimits) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return bytes(body)


def parse_object(body: bytes, limits: HttpLimits) -> dict[str, Any]:
    """The JSON object that `body` spells. Raises ApiError."""
    _check_nesting(body, limits.nesting)
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise _bad_json("is not UTF-8") from None
    except json.JSONDecodeError as exc:
        raise _bad_json(f"is not JSON at line {exc.lineno}, column {exc.colno}") from None
    except (ValueError, RecursionError):  # a constant, or a number of thousands of digits
        raise _bad_json("holds a number that JSON does not have") from None
    if not isinstance(value, dict):
        raise _bad_json("is not a JSON object")
    return value


def _check_nesting(body: bytes, limit: int) -> None:
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        first = match[0][:1]
        if first in b"[{":
            depth += 1
            if depth > limit:
                raise _bad_json(f"is nested more than {limit} deep")
        elif first in b"]}":
            depth -= 1


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _bad_json(problem: str) -> ApiError:
    return ApiError(400, f"the body {problem}", "invalid_json")


def _too_large(limits: HttpLimits) -> ApiError:
    return ApiError(
        413, f"the body has more than {limits.body_bytes:,} bytes; send less", "body_too_large"
    )
