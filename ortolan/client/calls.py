"""What both clients share: the channel's settings, errors, and when to try again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

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

# What the server may send: ids of a text as long as it takes; see runtime/serve/grpc_server.py.
_MAX_RECEIVE_BYTES = 32 * 2**20

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", -1),  # the server says what is too long
    # A server that vanished without a word is noticed while an answer is awaited.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # By default a channel that could not connect waits a second, then longer and longer.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_DETAILS_KEY = "grpc-status-details-bin"
READY_POLL_S = 0.1


@dataclass(frozen=True)
class RetryPolicy:
    """When a call that was turned away is made again: UNAVAILABLE and RESOURCE_EXHAUSTED only.

    A stream is never begun again after its first event. The server's hint is waited for, or where
    it gives none, backoff_s doubled each time; up to a quarter is added by chance, so that clients
    that were turned away together do not come back together.
    max_retries: 0 for none. max_wait_s: a hint above it ends the attempts.
    """

    max_retries: int = 4
    backoff_s: float = 0.2
    max_wait_s: float = 30.0


class Attempts:
    """One call's attempts, within its time."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None) -> None:
        self._policy = policy
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._made = 0

    @property
    def left_s(self) -> float | None:
        """What is left of the call's time; None: as long as it takes."""
        if self._deadline_s is None:
            return None
        return max(self._deadline_s - time.monotonic(), 0.0)

    def wait_s(self, error: Any) -> float | None:
        """Seconds to wait before the next attempt; None if the error is final."""
        hint = _retry_hint_s(error)
        code = error.code()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and hint is None:
            return None  # too large a message, which will not shrink
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            return None
        if self._made >= self._policy.max_retries:
            return None
        wait_s = hint if hint is not None else self._policy.backoff_s * 2**self._made
        if wait_s > self._policy.max_wait_s:
            return None
        wait_s *= 1 + 0.25 * random.random()
        if (left_s := self.left_s) is not None and wait_s >= left_s:
            return None
        self._made += 1
        return wait_s


def error_of(error: Any, address: str) -> OrtolanError:
    """The error of ours that a gRPC error stands for."""
    message, code = error.details() or "", error.code()
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT if _reason(error) == "TEMPLATE_REFUSED":
            return TemplateError(message)
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.NOT_FOUND:
            return RequestError(message)
        case grpc.StatusCode.UNAUTHENTICATED:
            return AuthenticationError(f"{address} refused the call: {message}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            hint = _retry_hint_s(error)
            if hint is None:
                return RequestError(f"{address} refused the call's size: {message}")
            limited = _reason(error) == "RATE_LIMITED"
            return (RateLimitError if limited else OverloadedError)(message, hint)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            # gRPC's own texts differ by who noticed first.
            own = _reason(error) is not None
            return TimedOutError(message if own else "the call's time is over")
        case grpc.StatusCode.CANCELLED:
            return CancelledError(message or "the call was cancelled")
        case grpc.StatusCode.UNAVAILABLE if _reason(error) is None:
            return EngineError(f"{address} cannot be reached ({message}); is the server running?")
        case grpc.StatusCode.UNIMPLEMENTED:
            return EngineError(f"{address} does not know this call; is it an Ortolan server?")
    return EngineError(message or f"{address} answered with {code.name}")


def why_not_ready(error: Any, address: str) -> str:
    """For a server that may become ready. Raises AuthenticationError, which no waiting helps."""
    found = error_of(error, address)
    if isinstance(found, AuthenticationError):
        raise found from error
    return str(found)


def unreachable(address: str, timeout_s: float, why: str) -> TimedOutError:
    """For waiting in vain."""
    return TimedOutError(f"{address} was not ready within {timeout_s:g} s: {why}")


def _detail(error: Any, kind: Any) -> Any:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                details = status_pb2.Status.FromString(value).details
            except ValueError:  # protobuf's DecodeError is one
                return None
            for packed in details:
                found = kind()
                if packed.Unpack(found):
                    return found
    return None


def _retry_hint_s(error: Any) -> float | None:
    info = _detail(error, error_details_pb2.RetryInfo)
    return None if info is None else max(info.retry_delay.ToNanoseconds() / 1e9, 0.0)


def _reason(error: Any) -> str | None:
    info = _detail(error, error_details_pb2.ErrorInfo)
    return None if info is None else str(info.reason)
