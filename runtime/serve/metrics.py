"""What Prometheus is told: the engine's own counters, and histograms of requests that ended.

No label holds what a client sent: routes and methods are those that were declared, statuses those
that we answer with, and the model's name is the operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import ortolan
from ortolan.runtime.engine.engine import EngineStats
from ortolan.runtime.engine.record import RequestRecord

# From a millisecond, a step of a tiny model, to minutes, a long answer of a large one on few
# cores: about three to a decade.
_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# Gaps between tokens have more to tell where people read along.
_TOKEN_BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)

_GAUGES = {
    "running": ("requests_running", "Answers that hold a slot; each of n counts."),
    "waiting": ("requests_waiting", "Answers that wait for a slot; each of n counts."),
    "kv_tokens": ("kv_tokens", "Tokens whose KV running requests hold."),
    "kv_budget_tokens": ("kv_budget_tokens", "Most tokens whose KV running requests may hold."),
    "prefix_blocks": ("prefix_cache_blocks", "Blocks of 16 tokens in the prefix cache."),
    "prefix_capacity_blocks": ("prefix_cache_capacity_blocks", "Most blocks that it may hold."),
}
_COUNTERS = {
    "steps": ("steps", "Steps that the engine has made."),
    "preemptions": ("preemptions", "Times that a running answer lost its slot for a while."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens read by the model; reused ones are not."),
    "completion_tokens": ("completion_tokens", "Tokens made."),
    "prefix_query_tokens": ("prefix_query_tokens", "Prompt tokens sought in the prefix cache."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Prompt tokens found there, and not read again."),
}


class Metrics:
    """A server's metrics, in a registry of their own.

    model: its served name. provider: of execution. stats: the engine's. not_ready: why requests
    are not welcome, None if they are.
    """

    def __init__(
        self,
        *,
        model: str,
        provider: str,
        onnxruntime: str,
        stats: Callable[[], EngineStats],
        not_ready: Callable[[], str | None],
    ) -> None:
        self._stats = stats
        self._not_ready = not_ready
        self._build = {
            "version": ortolan.__version__,
            "onnxruntime": onnxruntime,
            "provider": provider,
            "model": model,
        }
        self._calls = Counter(
            "ortolan_calls",
            "Calls answered, by protocol, route or method, and status.",
            ("protocol", "route", "status"),
            registry=None,
        )
        self._queue = _histogram("request_queue_seconds", "From submission to the first slot.")
        self._ttft = _histogram("time_to_first_token_seconds", "From submission to first token.")
        self._token = _histogram(
            "time_per_output_token_seconds",
            "Mean gap between an answer's tokens after the first, one value per answer.",
            _TOKEN_BUCKETS_S,
        )
        self._total = _histogram("request_duration_seconds", "From submission to the end.")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collected(self._collect))
        ProcessCollector(namespace="ortolan", registry=self._registry)

    def observe(self, record: RequestRecord) -> None:
        """A request has ended. Takes about 5 us."""
        if record.admitted_s is not None:
            self._queue.observe(record.admitted_s)
        if record.first_token_s is not None:
            self._ttft.observe(record.first_token_s)
        for seconds in record.token_s:
            self._token.observe(seconds)
        self._total.observe(record.ended_s)

    def count_call(self, protocol: str, route: str, status: str) -> None:
        """A call has been answered; route and status must be ours, not the client's."""
        self._calls.labels(protocol, route, status).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that an Accept header prefers, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def _collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield InfoMetricFamily("ortolan_build", "What is running.", value=self._build)
        ready = float(self._not_ready() is None)
        yield GaugeMetricFamily("ortolan_ready", "Whether requests are welcome.", value=ready)
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"ortolan_{name}", text, value=getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"ortolan_{name}", text, value=getattr(stats, field))
        finished = CounterMetricFamily(
            "ortolan_requests_finished", "Answers by how they ended.", labels=["reason"]
        )
        for reason in ("stop", "length", "cancelled", "timed out", "failed"):
            finished.add_metric([reason.replace(" ", "_")], stats.ended.get(reason, 0))
        yield finished
        phases = CounterMetricFamily(
            "ortolan_step_seconds", "Time that steps have spent, by phase.", labels=["phase"]
        )
        for phase in ("prefill", "decode", "sample", "other"):
            phases.add_metric([phase], stats.phase_seconds.get(phase, 0.0))
        yield phases
        for own in (self._queue, self._ttft, self._token, self._total, self._calls):
            for metric in own.collect():
                # When each series began is known from ortolan_process_start_time_seconds.
                metric.samples = [
                    one for one in metric.samples if not one.name.endswith("_created")
                ]
                yield metric


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def _histogram(name: str, text: str, buckets: tuple[float, ...] = _BUCKETS_S) -> Histogram:
    return Histogram(f"ortolan_{name}", text, buckets=buckets, registry=None)
