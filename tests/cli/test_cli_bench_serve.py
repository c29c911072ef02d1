"""`ortolan bench --serve`: the three forms of its report, and what does not go together."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from fake_openai import FakeOpenAi, fake_openai

Run = Callable[..., Result]

LOAD = ("--requests", "6", "--clients", "3", "--output-tokens", "2,4", "--repeat", "2")


@pytest.fixture
def fake() -> Iterator[FakeOpenAi]:
    """Its eighth completion, the fifth after the warm-up, is turned away."""
    with fake_openai(behaviour=lambda number: "status" if number == 7 else "good") as running:
        yield running


def test_json_has_load_servers_and_results(run: Run, fake: FakeOpenAi) -> None:
    """Figures without the load that gave them cannot be compared."""
    done = run("bench", "--serve", fake.url, *LOAD, "--output", "json", "--ignore-eos")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema_version"].startswith("1.")
    assert found["machine"]["cores"] >= 1
    assert "ortolan" in found["versions"]
    assert found["servers"][fake.url] == {"protocol": "http", "model": "fake", "software": "fake/1"}
    assert found["settings"]["arrivals"] == "closed loop, 3 clients"
    assert found["settings"]["warm_up_requests"] == 3
    (row,) = found["results"]
    assert (row["requests"], row["completed"]) == (12, 11)
    assert row["lost"] == {"status 503": {"count": 1, "first": "come back later"}}
    assert row["finish_reasons"] == {"length": 11}
    assert (row["tokens_from"], row["late_ms"]) == ("usage", None)
    assert len(row["tokens_per_s"]["samples"]) == 2
    assert all(body["ignore_eos"] for body in fake.bodies)
    wanted = sum(body["max_tokens"] for i, body in enumerate(fake.bodies) if i >= 3 and i != 7)
    assert row["output_tokens"] == wanted


def test_table_shows_lost_requests_and_ratios(run: Run, fake: FakeOpenAi) -> None:
    """What was lost stands beside what was reached."""
    with fake_openai(usage=False) as other:
        done = run("bench", "--serve", fake.url, "--against", other.url, *LOAD)
    assert done.exit_code == 0, done.stderr
    for part in (
        *("tokens/s", "first token", "per token after it", "whole answer", "1 of 12"),
        *("lost: status 503", "come back later", "the server gives no usage"),
        *("time to first token", "tokens per second", "closed loop, 3 clients"),
    ):
        assert part in done.stdout


def test_csv_has_one_line_for_each_server(run: Run, fake: FakeOpenAi) -> None:
    """For spreadsheets: plain numbers under fixed names."""
    with fake_openai() as other:
        options = ("--against", other.url, *LOAD, "--output", "csv")
        done = run("bench", "--serve", fake.url, *options)
    ours, theirs = csv.DictReader(io.StringIO(done.stdout))
    assert (ours["system"], ours["lost"], ours["ratio"]) == (fake.url, "1", "")
    assert (theirs["system"], theirs["lost"]) == (other.url, "0")
    for name in ("tokens_per_s", "ttft_ms_p50", "ratio", "ttft_ratio_low"):
        assert float(theirs[name]) > 0
    assert float(theirs["token_ms_p99"]) >= 0  # 0 where a whole answer came in one piece


def test_trace_is_sent_as_recorded(run: Run, fake: FakeOpenAi, tmp_path: Path) -> None:
    """Its prompts, its lengths, its times."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": 0.01 * i, "prompt": f"p{i}", "max_tokens": i + 1} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("--trace", trace, "--repeat", "1", "--warm-up", "0", "--output", "json")
    done = run("bench", "--serve", fake.url, *options)
    assert done.exit_code == 0, done.stderr
    assert sorted(body["prompt"] for body in fake.bodies) == ["p0", "p1", "p2"]
    found = json.loads(done.stdout)
    assert found["settings"]["arrivals"] == "as recorded"
    assert found["results"][0]["output_tokens"] == 1 + 2 + 3
    assert found["results"][0]["late_ms"]["p50"] >= 0


def test_poisson_arrivals_are_said(run: Run, fake: FakeOpenAi) -> None:
    """Throughput then is the load's, and only the waiting times are the server's."""
    options = ("--rate", "200", "--requests", "4", "--repeat", "1", "--output-tokens", "2")
    done = run("bench", "--serve", fake.url, *options)
    assert done.exit_code == 0, done.stderr
    assert "Poisson, 200 requests/s" in done.stdout
    assert "sent late by the client" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give either BUNDLE"),
        (("x", "--serve", "http://h:1"), "give either BUNDLE"),
        (("x", "--clients", "2"), "--clients means nothing when a bundle is measured"),
        (("--serve", "http://h:1", "--profile"), "--profile means nothing when a server"),
        (("--serve", "http://h:1", "--accuracy", "exact"), "--accuracy means nothing when a serv"),
        (("x", "--api-key", "k"), "--api-key means nothing when a bundle"),
        (("--serve", "h:1"), "must begin with http://, https://, grpc:// or"),
        (("--serve", "http://h:1", "--against", "http://h:1"), "given twice"),
        (("--serve", "http://h:1", "--clients", "1", "--rate", "1"), "give one of them"),
        (("--serve", "http://h:1", "--prompt-words", "5,x"), "no range such as 8,150"),
        (("--serve", "http://h:1", "--output-tokens", "5,4"), "no range such as 8,150"),
        (("--serve", "http://h:1", "--trace", "absent"), "cannot be read"),
    ],
)
def test_wrong_option_is_one_sentence(run: Run, options: tuple[str, ...], message: str) -> None:
    """Found before anything is connected, and said once."""
    done = run("bench", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
