"""One call of a client, from its head to the end of all that it asked for, whatever the protocol.

A protocol opens a call, and says when it is over. What `Service.submit` is given meanwhile belongs
to it. Then the call is counted, logged in one line, and traced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal

from ortolan.runtime.engine.record import RequestRecord
from ortolan.runtime.params import Request
from ortolan.runtime.serve import tracing
from ortolan.runtime.serve.metrics import Metrics

_logger = logging.getLogger(__name__)

# Asked every few seconds by machines: their lines are for debugging only.
_PROBES = (
    "/health/",
    "/metrics",
    "/grpc.health.",
    "/grpc.reflection.",
    "/inference.GRPCInferenceService/Server",
    "/inference.GRPCInferenceService/ModelReady",
)
OTHER = "other"  # the route of what no route takes

_CURRENT: ContextVar[Call | None] = ContextVar("ortolan_call", default=None)


def current_call() -> Call | None:
    """The call that is being answered where this is called; None outside of any."""
    return _CURRENT.get()


class Call:
    """See the module. All methods are for one event loop.

    headers: of which only the W3C trace context is looked at. route: a path as it was declared or
    a method's name, never what a client sent. status: as the client gets it. tenant: on whose
    behalf, where keys are checked.
    """

    def __init__(
        self,
        protocol: Literal["http", "grpc"],
        request_id: str,
        headers: Mapping[str, str],
        *,
        model: str,
        metrics: Metrics,
    ) -> None:
        self.protocol = protocol
        self.request_id = request_id
        self.trace_context = {name: headers[name] for name in tracing.HEADERS if name in headers}
        self.model = model
        self.route = OTHER
        self.status: str | None = None
        self.tenant: str | None = None
        self.requests: list[Request] = []
        self.records: list[RequestRecord] = []
        self.began_ns = time.time_ns()
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._metrics = metrics
        self._open = 0  # requests that have not ended
        self._over = self._reported = False
        _CURRENT.set(self)

    def submitted(self, request: Request) -> None:
        """The engine has accepted a request of this call."""
        self.requests.append(request)
        self._open += 1

    def ended(self, record: RequestRecord) -> None:
        """One of its requests has ended; this may come after the call is over."""
        self.records.append(record)
        self._open -= 1
        self._report()

    def over(self, status: str) -> None:
        """The client has all that it will get. Its line waits for requests that have not ended."""
        if not self._over:
            self._over, self.status = True, status
            self.seconds = time.perf_counter() - self._began
            self._report()

    def _report(self) -> None:
        if not self._over or self._open > 0 or self._reported:
            return
        self._reported = True
        assert self.status is not None
        self._metrics.count_call(self.protocol, self.route, self.status)
        level = logging.DEBUG if self.probe else logging.INFO
        if _logger.isEnabledFor(level):
            _logger.log(level, "call finished", extra=self.fields())
        if not self.probe:
            tracing.trace(self)

    @property
    def probe(self) -> bool:
        """Whether it only asked how the server is."""
        return self.route.startswith(_PROBES)

    @property
    def finish_reasons(self) -> list[str]:
        """Of all answers to all its prompts."""
        return [reason for record in self.records for reason in record.reasons]

    @property
    def queue_s(self) -> float | None:
        """The longest that a prompt waited."""
        waits = [one.admitted_s for one in self.records if one.admitted_s is not None]
        return max(waits, default=None)

    @property
    def ttft_s(self) -> float | None:
        """From the first submission to the first token of all."""
        firsts = [one.first_token_s for one in self.records if one.first_token_s is not None]
        return min(firsts, default=None)

    def tokens(self, kind: str) -> int:
        """How many prompt, cached or completion tokens its requests had."""
        return sum(getattr(record, f"{kind}_tokens") for record in self.records)

    def fields(self) -> dict[str, Any]:
        """What its line in the log says: nothing of prompts, answers or keys."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "protocol": self.protocol,
            "route": self.route,
            "status": self.status,
            "model": self.model,
        }
        if self.tenant is not None:
            fields["tenant"] = self.tenant
        if self.records:
            fields["finish_reasons"] = self.finish_reasons
            for kind in ("prompt", "cached", "completion"):
                fields[f"{kind}_tokens"] = self.tokens(kind)
            for name, seconds in (("queue_ms", self.queue_s), ("ttft_ms", self.ttft_s)):
                if seconds is not None:
                    fields[name] = round(seconds * 1000, 1)
        fields["total_ms"] = round(self.seconds * 1000, 1)
        return fields
