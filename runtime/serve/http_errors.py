"""What goes wrong, as HTTP says it: a status and OpenAI's error object, short, never the input."""

from __future__ import annotations

import json
import logging
import math
import re
import traceback
from collections.abc import Mapping

from ortolan.errors import (
    AuthenticationError,
    CancelledError,
    EngineError,
    OverloadedError,
    RateLimitError,
    RequestError,
    TemplateError,
    TimedOutError,
)

_LOG = logging.getLogger(__name__)
_LONGEST_MESSAGE = 500  # characters
_LONGEST_NAME = 64

_TYPES = {429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """An error with a status. param: the field at fault. headers: what the answer also has."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_bounded(message, _LONGEST_MESSAGE))
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The answer's body, JSON."""
        kind = _TYPES.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """400: a field has a value that it cannot have. `message` goes on from the field's name."""
    return ApiError(400, f"{param} {message}", code, param=param)


def shown_name(name: str) -> str:
    """A field's name as an error shows it: printable and bounded."""
    return _bounded(ascii(name)[1:-1], _LONGEST_NAME)


def as_api_error(
    exc: Exception, *, request_id: str, not_ready: str | None, spellings: Mapping[str, str]
) -> ApiError:
    """What a client is told of an exception; faults of our own are logged, without their text.

    not_ready: the service's reason, which makes an engine's failure a matter of this server, not
    of the request. spellings: our name of a field -> how this request spelled it.
    """
    match exc:
        case ApiError():
            return exc
        case RequestError():
            return ApiError(400, str(exc), "invalid_value", param=_field_in(str(exc), spellings))
        case TemplateError():
            return ApiError(400, str(exc), "template_error", param="messages")
        case AuthenticationError():
            scheme = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, str(exc), "invalid_api_key", headers=scheme)
        case RateLimitError():
            retry = {"Retry-After": str(math.ceil(exc.retry_after_s))}
            return ApiError(429, str(exc), "rate_limit_exceeded", headers=retry)
        case OverloadedError():
            retry = {"Retry-After": str(math.ceil(exc.retry_after_s))}
            return ApiError(429, str(exc), "overloaded", headers=retry)
        case TimedOutError():
            # Clients repeat what failed with a 5xx; this one would only be late again.
            return ApiError(504, str(exc), "timeout", headers={"x-should-retry": "false"})
        case CancelledError():
            return ApiError(503, str(exc), "shutting_down")
        case EngineError() if not_ready is not None:
            return ApiError(503, not_ready, "not_ready", headers={"Retry-After": "5"})
        case EngineError():
            return ApiError(500, str(exc), "engine_error")
    # An exception's own text may quote what it choked on, so only its kind and place are logged.
    place = "".join(traceback.format_tb(exc.__traceback__))
    _LOG.error("request %s failed: %s\n%s", request_id, type(exc).__name__, place)
    return ApiError(
        500, f"a fault of the server; its log names the place under {request_id}", "internal_error"
    )


def _field_in(message: str, spellings: Mapping[str, str]) -> str | None:
    """The field that a RequestError names; most begin with it."""
    if message.startswith("the prompt"):
        return spellings.get("prompt", "prompt")
    for word in re.findall(r"[a-z_]+", message):
        if word in spellings:
            return spellings[word]
    return None


def _bounded(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
