"""What became of a request, and what a connection to a server has to be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ortolan.bench.serving.load import LoadRequest

# How a request may be lost; "status N" and, over gRPC, names of our errors are others.
NOT_CONNECTED = "not connected"
DROPPED = "connection dropped"
ERROR = "error in the stream"
NO_FINISH = "no finish reason"
TIMED_OUT = "timed out"
MALFORMED = "malformed answer"


@dataclass(frozen=True)
class Outcome:
    """One request's answer; times in seconds on time.perf_counter's clock.

    first_s, last_s: when the first and the last token arrived; None if none did. tokens: of the
    answer; from_usage: counted by the server, otherwise events with text are counted.
    resent: the connection was kept from an earlier request, and closed under this one.
    lost: why there is no whole answer, one of the kinds above; detail: what was said.
    """

    end_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    from_usage: bool = False
    finish_reason: str | None = None
    resent: bool = False
    lost: str | None = None
    detail: str = ""


class Reply(Protocol):
    """What came back of a request, unread: reading waits until nothing is measured any more."""

    def outcome(self) -> Outcome:
        """Read it."""


@dataclass(frozen=True)
class Lost:
    """A reply of which nothing is left to read."""

    kind: str
    detail: str
    end_s: float

    def outcome(self) -> Outcome:
        return Outcome(self.end_s, lost=self.kind, detail=self.detail)


class Wire(Protocol):
    """Connections to one server."""

    async def send(self, request: LoadRequest) -> Reply:
        """Send a request and wait for the end of its answer. Cancelling ends it at the server.

        Raises nothing else: whatever fails is a reply that is lost.
        """

    async def close(self) -> None:
        """Close all connections."""
