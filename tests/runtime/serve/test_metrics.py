"""What Prometheus is told, and that what is written about it is true."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from grpc_serving import LONG, NO_RETRY, PROMPT, begun, held, in_loop
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from serving_both import Both, serving_both

from ortolan.client.aio import AsyncClient
from ortolan.errors import TimedOutError
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1.ortolan_pb2_grpc import InferenceServiceStub

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy/grafana/ortolan.json"
DOCUMENT = ROOT / "docs/metrics.md"
NAME = re.compile(r"\bortolan_[a-z_]+")


def other_model(name: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=name, text="x")


async def read(call: Any) -> None:
    async for _ in call:
        pass


async def families(both: Both) -> dict[str, Metric]:
    """Name -> family, as a scrape finds them."""
    status, headers, text = await both.call("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(found: dict[str, Metric]) -> dict[str, dict[str, float]]:
    """Sample's name -> its labels, in one text -> value."""
    result: dict[str, dict[str, float]] = {}
    for family in found.values():
        for one in family.samples:
            labels = " ".join(one.labels.values())
            result.setdefault(one.name, {})[labels] = one.value
    return result


def exported() -> dict[str, Metric]:
    """All families, of a server that has answered one request."""
    found: dict[str, Metric] = {}

    async def scrape() -> None:
        async with serving_both() as both:
            assert await both.completion() == 200
            found.update(await families(both))

    asyncio.run(scrape())
    return found


@in_loop
async def test_requests_of_both_protocols_are_counted_alike() -> None:
    """Half of the traffic missing from a graph is worse than no graph."""
    async with serving_both() as both, AsyncClient(both.grpc, retry=NO_RETRY) as client:
        assert await both.completion(n=2) == 200
        await client.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
        found = samples(await families(both))
    assert found["ortolan_requests_finished_total"]["length"] == 3
    assert found["ortolan_completion_tokens_total"][""] == 2 * 4 + 6
    assert found["ortolan_prompt_tokens_total"][""] == 3 + 4
    assert found["ortolan_time_to_first_token_seconds_count"][""] == 2
    assert found["ortolan_request_queue_seconds_count"][""] == 2
    assert found["ortolan_request_duration_seconds_count"][""] == 2
    assert found["ortolan_time_per_output_token_seconds_count"][""] == 3
    # On the mock's clock: 10 ms a step.
    assert found["ortolan_step_seconds_total"]["decode"] == pytest.approx(0.01 * (3 + 5))
    assert found["ortolan_time_per_output_token_seconds_sum"][""] == pytest.approx(0.03)
    assert found["ortolan_ready"][""] == 1
    calls = found["ortolan_calls_total"]
    assert calls["http /v1/completions 200"] == 1
    assert calls["grpc /ortolan.v1.InferenceService/Generate OK"] == 1


@in_loop
async def test_what_runs_and_waits_is_seen_while_it_does() -> None:
    """Load is seen before it has become late answers, or not at all."""
    async with serving_both(slots=1) as both, AsyncClient(both.grpc, retry=NO_RETRY) as client:
        running = await begun(both.service, client)
        calls = [asyncio.create_task(client.generate(PROMPT, **LONG)) for _ in range(2)]
        while both.service.stats().waiting < 2:  # what is submitted arrives between steps
            await held(both.service)
            both.service.gate.step()
        found = samples(await families(both))
        both.service.gate.open()
        await asyncio.gather(*calls)
        await running.aclose()
    assert found["ortolan_requests_running"][""] == 1
    assert found["ortolan_requests_waiting"][""] == 2
    assert found["ortolan_kv_tokens"][""] >= len(PROMPT)
    assert "grpc /ortolan.v1.InferenceService/Generate OK" not in found.get(
        "ortolan_calls_total", {}
    )


@in_loop
async def test_nothing_that_a_client_sends_becomes_a_label() -> None:
    """litellm#39136: whoever may send names could mint series until the server is full."""
    async with (
        serving_both() as both,
        AsyncClient(both.grpc, retry=NO_RETRY) as client,
        grpc.aio.insecure_channel(both.grpc) as channel,
    ):
        assert await both.completion() == 200
        await client.stats()
        before = samples(await families(both))
        for index in range(5):
            evil = f"evil{index}"
            await both.completion(model=evil)
            await both.call(f"/{evil}")
            await both.call(f"/v1/models/{evil}", headers={"x-request-id": evil})
            await both.call("/v1/models", headers={"traceparent": evil, "user-agent": evil})
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/{evil}/Method")(b"")
            with pytest.raises(grpc.aio.AioRpcError, match=evil):
                await read(InferenceServiceStub(channel).Generate(other_model(evil)))
        after = samples(await families(both))
    assert not [name for name, series in after.items() if "evil" in f"{name} {list(series)}"]
    new = after["ortolan_calls_total"].keys() - before["ortolan_calls_total"].keys()
    assert new == {
        "http /v1/completions 404",
        "http other 404",
        "http /v1/models/{id:path} 404",
        "http /v1/models 200",
        "http /metrics 200",
        "grpc /ortolan.v1.InferenceService/Generate NOT_FOUND",
    }
    assert after["ortolan_calls_total"]["http other 404"] == 5


@in_loop
async def test_calls_that_end_badly_are_counted_under_how_they_did() -> None:
    """An alert on failures needs cancelled, late and refused calls apart from them."""
    async with serving_both() as both, AsyncClient(both.grpc, retry=NO_RETRY) as client:
        late = await begun(both.service, client, timeout_s=2.0)
        with pytest.raises(TimedOutError):
            async for _ in late:
                pass
        both.service.gate.open()
        leaving = await begun(both.service, client)
        await leaving.aclose()
        both.service.gate.open()
        assert await both.completion(temperature=-1) == 400

        def count(status: str) -> bool:
            name = f"grpc /ortolan.v1.InferenceService/Generate {status}"
            return name in calls

        calls: dict[str, float] = {}
        while not (count("DEADLINE_EXCEEDED") and count("CANCELLED")):
            calls = samples(await families(both)).get("ortolan_calls_total", {})
        assert calls["http /v1/completions 400"] == 1


def test_formats_are_those_that_scrapers_read() -> None:
    """A single malformed line costs a scrape all others."""

    async def scrape() -> None:
        async with serving_both() as both:
            assert await both.completion() == 200
            accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
            _, headers, text = await both.call("/metrics", headers=accept)
            assert headers["content-type"].startswith("application/openmetrics-text")
            names = {family.name for family in openmetrics.text_string_to_metric_families(text)}
            assert "ortolan_requests_finished" in names

    asyncio.run(scrape())


def test_names_follow_prometheus_rules() -> None:
    """promtool check metrics asks for the same: units and kinds are read off names."""
    for name, family in exported().items():
        assert name.startswith("ortolan_")
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|gauge|counter|histogram)\b", name)
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert not sample.name.endswith("_created")
        if family.type == "histogram":
            assert name.endswith("_seconds")
            bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
            assert bounds == sorted(bounds)
            assert bounds[0] <= 0.001  # a step of a tiny model
            assert bounds[-2] >= 5


def test_build_info_says_what_runs() -> None:
    """The first question of whoever looks at a graph that has changed."""
    (sample,) = exported()["ortolan_build_info"].samples
    assert set(sample.labels) == {"version", "onnxruntime", "provider", "model"}
    assert sample.labels["model"] == "mock"


def expressions(node: object) -> Iterator[str]:
    """All queries in a dashboard."""
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        for value in node.values():
            yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def sample_names(found: dict[str, Metric]) -> dict[str, set[str]]:
    """Sample's name -> its labels."""
    labels: dict[str, set[str]] = {}
    for family in found.values():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_dashboard_asks_for_what_is_exported() -> None:
    """A panel whose metric was renamed is empty, and looks like a quiet day."""
    known = sample_names(exported())
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = list(expressions(board["panels"]))
    assert len(queries) > 10
    for query in queries:
        names = NAME.findall(query)
        assert names, query
        for name in names:
            assert name in known, query
        for labels in re.findall(r"by \(([^)]*)\)", query):
            allowed = set().union(*(known[name] for name in names)) | {"instance", "job"}
            assert {label.strip() for label in labels.split(",")} <= allowed, query
        if "_bucket" in query:
            assert "by (le" in query, query
        for name in names:
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert re.search(rf"(rate|increase)\({name}", query), query


def test_dashboard_can_be_imported_anywhere() -> None:
    """One with somebody's own data source in it shows nothing elsewhere."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert board["uid"] == "ortolan"
    variables = {one["name"] for one in board["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["description"]


def test_document_names_every_metric_and_no_other() -> None:
    """An operator writes alerts from the page, and finds on it what a scrape shows."""
    found = exported()
    text = DOCUMENT.read_text(encoding="utf-8")
    table = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in NAME.findall(line.split("|")[1])
    }
    shown = {
        f"{name}_total" if family.type == "counter" else name for name, family in found.items()
    }
    assert table == shown
    known = sample_names(found).keys() | shown
    for name in NAME.findall(text):
        assert name in known, name
