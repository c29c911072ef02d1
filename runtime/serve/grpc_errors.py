"""Errors as canonical status codes with google.rpc details."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from ortolan.errors import (
    AuthenticationError,
    CancelledError,
    EngineError,
    OrtolanError,
    OverloadedError,
    RateLimitError,
    RequestError,
    TemplateError,
    TimedOutError,
)
from ortolan.runtime.serve.grpc_convert import SAMPLING_FIELDS

DOMAIN = "ortolan"

# Most bytes of an error's text. It goes into trailers twice, once percent-encoded (three times as
# long at worst), and many clients refuse trailers above 8 KiB.
MOST_MESSAGE_BYTES = 1000

# When a server that is not ready should be asked again, unless another one can be.
_NOT_READY_RETRY_S = 1.0

_SAMPLING_FIELD = re.compile(rf"\b({'|'.join(SAMPLING_FIELDS)})\b")


class UnknownModelError(RequestError):
    """Another model than the served one was asked for."""


def field_of(message: str) -> str:
    """The request's field that an error's message is about; messages begin with its name."""
    about = message.partition(";")[0]
    if about.startswith(("the prompt", "a prompt", "this bundle has no tokenizer")):
        return "prompt"
    found = _SAMPLING_FIELD.search(about)
    if found:
        return f"sampling.{found[1]}"
    first = about.partition(" ")[0]
    names = {
        "priority": "options.priority",
        "salt": "options.cache_salt",
        "timeout_s": "the call's deadline",
    }
    return names.get(first, "prompt")


def status_of(
    error: OrtolanError,
    *,
    unavailable: bool,
    hidden: Mapping[str, str] | None = None,
    field_of: Callable[[str], str] = field_of,
) -> Status:
    """What the caller is told.

    unavailable: the server is starting or shutting down. hidden: text -> what stands for it.
    field_of: a message -> the field that it is about, as the service calls it.
    """
    message = str(error)
    for text, shown in (hidden or {}).items():
        message = message.replace(text, shown)
    message = bounded(message)
    if unavailable and isinstance(error, EngineError | CancelledError):
        # Whoever was cut off by a shutdown did not cancel; another server may serve it.
        retry = _retry(_NOT_READY_RETRY_S)
        return _status(code_pb2.UNAVAILABLE, message, "NOT_READY", retry)
    match error:
        case UnknownModelError():
            return _status(code_pb2.NOT_FOUND, message, "MODEL_NOT_FOUND")
        case TemplateError():
            bad = _bad_request("messages", message)
            return _status(code_pb2.INVALID_ARGUMENT, message, "TEMPLATE_REFUSED", bad)
        case RequestError():
            bad = _bad_request(field_of(message), message)
            return _status(code_pb2.INVALID_ARGUMENT, message, "INVALID_REQUEST", bad)
        case AuthenticationError():
            return _status(code_pb2.UNAUTHENTICATED, message, "INVALID_API_KEY")
        case RateLimitError():
            retry = _retry(error.retry_after_s)
            return _status(code_pb2.RESOURCE_EXHAUSTED, message, "RATE_LIMITED", retry)
        case OverloadedError():
            retry = _retry(error.retry_after_s)
            return _status(code_pb2.RESOURCE_EXHAUSTED, message, "OVERLOADED", retry)
        case TimedOutError():
            return _status(code_pb2.DEADLINE_EXCEEDED, message, "TIMED_OUT")
        case CancelledError():
            return _status(code_pb2.CANCELLED, message, "CANCELLED")
    return _status(code_pb2.INTERNAL, message, "ENGINE_FAILED")


def unexpected() -> Status:
    """For a fault of ours, of which the caller learns nothing but that it happened."""
    return _status(
        code_pb2.INTERNAL,
        "something unexpected went wrong; the server's log says what",
        "UNEXPECTED",
    )


def bounded(text: str) -> str:
    """The text, cut where it is too long for a trailer."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MOST_MESSAGE_BYTES:
        return encoded.decode("utf-8")
    return encoded[: MOST_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."


def _status(code: int, message: str, reason: str, *details: Any) -> Status:
    status = Status(code=code, message=message)
    for detail in (ErrorInfo(reason=reason, domain=DOMAIN), *details):
        status.details.add().Pack(detail)
    return status


def _bad_request(field: str, description: str) -> BadRequest:
    violation = BadRequest.FieldViolation(field=field, description=description)
    return BadRequest(field_violations=[violation])


def _retry(seconds: float) -> RetryInfo:
    delay = Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return RetryInfo(retry_delay=delay)
