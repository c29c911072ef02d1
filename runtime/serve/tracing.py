"""A span of OpenTelemetry for each call, where its API is installed and somebody configured it.

Only the API is used: which SDK, exporter and sampling there are is the operator's choice, as with
`opentelemetry-instrument ortolan serve`. Without the API this costs nothing. Attributes are those
of the semantic conventions for generative AI.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ortolan

if TYPE_CHECKING:
    from ortolan.runtime.serve.calls import Call

try:
    from opentelemetry import trace as otel
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:  # a server without tracing is a server
    otel = None  # type: ignore[assignment]

# Of W3C Trace Context; the parent of our span.
HEADERS = ("traceparent", "tracestate")

_REQUEST = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_PENALTIES = ("presence_penalty", "frequency_penalty")
# An HTTP status from here on is the server's fault, as are these of gRPC: the conventions' rule.
_HTTP_FAULT = 500
_GRPC_FAULTS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


def trace(call: Call) -> None:
    """Record the span of a call that is over, from its beginning on."""
    if otel is None:
        return
    tracer = otel.get_tracer("ortolan", ortolan.__version__)
    operation = _operation(call)
    span = tracer.start_span(
        f"{operation} {call.model}" if operation else call.route,
        context=TraceContextTextMapPropagator().extract(call.trace_context),
        kind=otel.SpanKind.SERVER,
        start_time=call.began_ns,
    )
    if span.is_recording():
        span.set_attributes(_about_call(call))
        if operation:
            span.set_attributes(_about_requests(call, operation))
        if (error := _error(call)) is not None:
            span.set_attribute("error.type", error)
            span.set_status(otel.StatusCode.ERROR)
    span.end(call.began_ns + int(call.seconds * 1e9))


def _operation(call: Call) -> str | None:
    """The convention's name of what was asked of the model, if it came to that."""
    if not call.requests:
        return None
    return "text_completion" if call.requests[0].continues else "chat"


def _about_call(call: Call) -> dict[str, Any]:
    about: dict[str, Any] = {"ortolan.request_id": call.request_id}
    if call.protocol == "http":
        about["http.route"] = call.route
        about["http.response.status_code"] = int(call.status or 0)
    else:
        about["rpc.system.name"] = "grpc"
        about["rpc.method"] = call.route
        about["rpc.response.status_code"] = call.status
    if call.tenant is not None:
        about["ortolan.tenant"] = call.tenant
    return about


def _about_requests(call: Call, operation: str) -> dict[str, Any]:
    params = call.requests[0].params
    about: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ortolan",
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.usage.input_tokens": call.tokens("prompt"),
        "gen_ai.usage.output_tokens": call.tokens("completion"),
        "gen_ai.usage.cache_read.input_tokens": call.tokens("cached"),
        "gen_ai.response.finish_reasons": call.finish_reasons,
    }
    for name in _REQUEST:
        if (value := getattr(params, name)) is not None:
            about[f"gen_ai.request.{name}"] = value
    for name in _PENALTIES:
        if value := getattr(params, name):
            about[f"gen_ai.request.{name}"] = value
    if params.n > 1:
        about["gen_ai.request.choice.count"] = params.n
    if call.ttft_s is not None:
        about["gen_ai.response.time_to_first_chunk"] = call.ttft_s
    if call.queue_s is not None:
        about["ortolan.queue_s"] = call.queue_s
    return about


def _error(call: Call) -> str | None:
    """What went wrong: a status that is the server's fault, or how an answer ended."""
    status = call.status or ""
    http = call.protocol == "http"
    if int(status) >= _HTTP_FAULT if http else status in _GRPC_FAULTS:
        return status
    return next((one for one in call.finish_reasons if one not in ("stop", "length")), None)
