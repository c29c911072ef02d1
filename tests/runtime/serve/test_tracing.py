"""Spans of OpenTelemetry, as its own SDK collects them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

pytest.importorskip("starlette")
pytest.importorskip("opentelemetry.sdk")

from grpc_serving import NO_RETRY, PROMPT, in_loop
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from serving_both import serving_both

from ortolan.client.aio import AsyncClient
from ortolan.errors import EngineError, RequestError
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1.ortolan_pb2_grpc import InferenceServiceStub
from ortolan.runtime.serve import tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


class Tracing:
    """In the place of the API's global provider, which can be set only once in a process."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    tracing_ = Tracing()
    monkeypatch.setattr(tracing.otel, "get_tracer", tracing_.provider.get_tracer)
    yield tracing_
    tracing_.provider.shutdown()


@in_loop
async def test_request_is_a_span_with_the_conventions_attributes(traced: Tracing) -> None:
    """Backends draw token usage and latency from these names, and from no others."""
    async with serving_both() as both:
        assert await both.completion({"traceparent": TRACEPARENT, "x-request-id": "r1"}, n=2) == 200
    (span,) = traced.spans
    assert span.name == "text_completion mock"
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    about: dict[str, Any] = dict(span.attributes or {})
    first_s, queue_s = (
        about.pop("gen_ai.response.time_to_first_chunk"),
        about.pop("ortolan.queue_s"),
    )
    assert 0 <= queue_s <= first_s
    assert about == {
        "ortolan.request_id": "r1",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "ortolan",
        "gen_ai.request.model": "mock",
        "gen_ai.response.model": "mock",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time >= span.start_time


@in_loop
async def test_grpc_metadata_gives_the_parent_too(traced: Tracing) -> None:
    """A trace that ends at one of two protocols is half a trace."""
    async with serving_both() as both, grpc.aio.insecure_channel(both.grpc) as channel:
        message = pb.GenerateRequest(sampling=pb.SamplingParams(max_tokens=2, ignore_eos=True))
        message.token_ids.ids.extend(PROMPT)
        call = InferenceServiceStub(channel).Generate(
            message, metadata=(("traceparent", TRACEPARENT),)
        )
        async for _ in call:
            pass
    (span,) = traced.spans
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE
    about = dict(span.attributes or {})
    assert about["rpc.method"] == "/ortolan.v1.InferenceService/Generate"
    assert about["rpc.response.status_code"] == "OK"
    assert about["gen_ai.usage.output_tokens"] == 2


@in_loop
async def test_failures_of_the_server_are_errors_and_those_of_callers_are_not(
    traced: Tracing,
) -> None:
    """Error rates drawn from spans page somebody; a client's typing error must not."""
    async with serving_both() as both, AsyncClient(both.grpc, retry=NO_RETRY) as client:
        assert await both.completion(temperature=-1) == 400
        assert await both.completion(prompt=[6, 2, 6]) == 500  # the mock fails at 2
        with pytest.raises(RequestError, match="top_p"):
            await client.generate(PROMPT, top_p=7.0)
        with pytest.raises(EngineError, match="broke"):
            await client.generate([6, 2, 6], max_tokens=2)
    found = [
        (span.name, span.status.status_code, dict(span.attributes or {}).get("error.type"))
        for span in traced.spans
    ]
    assert found == [
        ("/v1/completions", StatusCode.UNSET, None),
        ("text_completion mock", StatusCode.ERROR, "500"),
        ("/ortolan.v1.InferenceService/Generate", StatusCode.UNSET, None),
        ("text_completion mock", StatusCode.ERROR, "INTERNAL"),
    ]


@in_loop
async def test_callers_decision_and_nonsense_in_headers_are_respected(traced: Tracing) -> None:
    """Sampling is decided at the head of a trace; a broken header costs the parent only."""
    async with serving_both() as both:
        assert await both.completion({"traceparent": UNSAMPLED}) == 200
        assert traced.spans == ()
        assert await both.completion({"traceparent": "nonsense", "tracestate": "a" * 3000}) == 200
        await both.call("/health/ready")  # probes would fill any backend
    (span,) = traced.spans
    assert span.parent is None


@in_loop
async def test_without_the_library_requests_are_served_all_the_same() -> None:
    """It is an option."""
    kept, tracing.otel = tracing.otel, None  # type: ignore[assignment]
    try:
        async with serving_both() as both:
            assert await both.completion({"traceparent": TRACEPARENT}) == 200
    finally:
        tracing.otel = kept
