"""Servers under load: what is counted, what is lost and how, who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_openai import FakeOpenAi, fake_openai

from ortolan.bench.serving.drive import Round, closed_loop, open_loop
from ortolan.bench.serving.grpc_wire import EventsReply
from ortolan.bench.serving.http_wire import HttpWire
from ortolan.bench.serving.load import LoadRequest, ServePlan
from ortolan.bench.serving.outcome import Outcome
from ortolan.bench.serving.report import serve_document, token_s, ttft_s
from ortolan.bench.serving.rounds import ServeResults, run_serve_bench
from ortolan.bench.serving.servers import OpenServer, read_address
from ortolan.errors import BenchError, UsageError

PATIENCE_S = 20.0
FIVE = [LoadRequest(f"prompt {number}", 3) for number in range(5)]


def loop_of(fake: FakeOpenAi, clients: int = 1, timeout_s: float = PATIENCE_S) -> Round:
    """Five requests of three tokens each by a closed loop."""

    async def run() -> Round:
        wire = HttpWire("127.0.0.1", fake.port, "")
        await wire.greet()
        found = await closed_loop(wire, FIVE, clients, timeout_s)
        await wire.close()
        return found

    return asyncio.run(run())


def kinds(found: Round) -> list[str | None]:
    return [one.outcome.lost for one in found.answers]


def only(name: str, at: int = 2) -> Callable[[int], str]:
    """Misbehave on one completion."""
    return lambda number: name if number == at else "good"


def test_whole_answers_are_counted_by_the_servers_usage() -> None:
    """Events are not tokens: a server may put several into one."""
    with fake_openai() as fake:
        found = loop_of(fake)
    outcomes = [one.outcome for one in found.answers]
    assert [(one.lost, one.tokens, one.finish_reason) for one in outcomes] == [
        (None, 3, "length")
    ] * 5
    assert all(one.from_usage and not one.resent for one in outcomes)
    assert fake.connections == 1
    for one in found.answers:
        assert one.outcome.first_s is not None
        assert one.outcome.last_s is not None
        assert one.due_s < one.outcome.first_s <= one.outcome.last_s <= one.outcome.end_s


def test_request_says_the_same_to_every_server() -> None:
    """Greedy, streamed, with usage; the model by the name that the server gives it."""
    with fake_openai() as fake:
        loop_of(fake)
    assert fake.bodies[0] == {
        "model": "fake",
        "prompt": "prompt 0",
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_events_are_counted_where_there_is_no_usage() -> None:
    """And said so: see the report."""
    with fake_openai(usage=False) as fake:
        found = loop_of(fake)
    assert [(one.outcome.tokens, one.outcome.from_usage) for one in found.answers] == [
        (3, False)
    ] * 5


@pytest.mark.parametrize(
    ("behaviour", "kind", "detail"),
    [
        ("status", "status 503", "come back later"),
        ("drop", "connection dropped", "bytes of the answer"),
        ("error event", "error in the stream", "the engine broke"),
        ("nonsense event", "malformed answer", "an event is '{'"),
        ("no finish", "no finish reason", "3 events with text"),
        ("not streamed", "malformed answer", "application/json"),
        ("not http", "malformed answer", "nonsense"),
    ],
)
def test_lost_request_has_its_kind(behaviour: str, kind: str, detail: str) -> None:
    """Half an answer must not raise anybody's throughput; the others go on."""
    with fake_openai(behaviour=only(behaviour)) as fake:
        found = loop_of(fake)
    assert kinds(found) == [None, None, kind, None, None]
    assert detail in found.answers[2].outcome.detail
    assert len(found.whole) == 4


def test_request_that_hangs_is_given_up_and_the_server_told() -> None:
    """One stuck answer must not end the measurement, nor keep the server busy with it."""
    order = ("good", "good", "hang", "after a client left", "good")
    with fake_openai(behaviour=lambda number: order[number]) as fake:
        found = loop_of(fake, timeout_s=2.0)
    assert kinds(found) == [None, None, "timed out", None, None]


def test_closed_kept_connection_is_no_lost_request() -> None:
    """A server may close an idle connection at any time; what was sent into it goes again."""
    with fake_openai(behaviour=only("drop at once")) as fake:
        found = loop_of(fake)
    assert kinds(found) == [None] * 5
    assert [one.outcome.resent for one in found.answers] == [False, False, True, False, False]


def test_new_connection_that_is_dropped_is_a_lost_request() -> None:
    """Then nothing excuses the server."""
    with fake_openai(behaviour=lambda number: "drop at once") as fake:
        found = loop_of(fake)
    # The first goes into the connection that has listed the models.
    assert kinds(found) == ["connection dropped"] * 5
    assert len(fake.bodies) == 6


@pytest.mark.parametrize("behaviour", ["close", "good, then closed"])
def test_server_that_closes_after_each_answer_loses_nothing(behaviour: str) -> None:
    """Announced or not, the answer was whole."""
    with fake_openai(behaviour=lambda number: behaviour) as fake:
        found = loop_of(fake)
    assert kinds(found) == [None] * 5


def test_closed_loop_has_so_many_requests_at_once() -> None:
    """One more, or one less, would be another load."""
    with fake_openai(pause_s=0.02) as fake:
        loop_of(fake, clients=3)
    assert fake.most_at_once == 3


def test_open_loop_does_not_wait_for_answers_and_counts_from_when_a_request_was_due() -> None:
    """A load that waits for a slow server hides how slow it is."""

    async def run(port: int) -> Round:
        wire = HttpWire("127.0.0.1", port, "")
        found = await open_loop(wire, FIVE, [0.0, 0.0, 0.0, 0.0, 0.1], PATIENCE_S)
        await wire.close()
        return found

    with fake_openai(pause_s=0.1) as fake:
        found = asyncio.run(run(fake.port))
    assert kinds(found) == [None] * 5
    assert fake.most_at_once >= 4
    due_s = sorted(one.due_s for one in found.answers)
    assert due_s[4] - due_s[0] == pytest.approx(0.1)
    assert all(one.due_s <= one.sent_s for one in found.answers)


def test_servers_take_turns_and_only_one_is_loaded() -> None:
    """Two servers at once on one machine would measure each other."""
    order: list[str] = []

    def noted(name: str) -> Callable[[int], str]:
        return lambda number: order.append(name) or "good"  # type: ignore[func-returns-value]  # None

    plan = ServePlan(requests=3, output_tokens=(1, 2), clients=2, repeat=2, warm_up=1)
    with fake_openai(behaviour=noted("a")) as a, fake_openai(behaviour=noted("b")) as b:
        results = run_serve_bench([a.url, b.url], plan)
    assert order == [*"ab", *"aaa", *"bbb", *"bbb", *"aaa"]
    # Within a round clients may overtake each other on their way.
    by_prompt = [sorted(fake.bodies, key=lambda body: body["prompt"]) for fake in (a, b)]
    assert by_prompt[0] == by_prompt[1]
    assert [len(found.answers) for found in results.rounds[a.url]] == [3, 3]


def test_server_that_is_not_there_is_said_at_once() -> None:
    """Not after the warm-up has waited for it."""
    with fake_openai() as fake:
        url = fake.url
    with pytest.raises(BenchError, match=r"does not answer .*is the server running"):
        run_serve_bench([url], ServePlan())


def test_server_that_answers_nothing_is_said_after_the_warm_up() -> None:
    """A wrong address of a server that runs: rounds of nothing would follow."""
    with (
        fake_openai(behaviour=lambda number: "status") as fake,
        pytest.raises(BenchError, match=r"none of 2 warm-up requests.*503: come back later"),
    ):
        run_serve_bench([fake.url], ServePlan(warm_up=2))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:8000", "must begin with"),
        ("ftp://x:1", "must begin with"),
        ("httpss://x:1", "must begin with"),
        ("grpcs://host", "must name host and port"),
        ("grpc://host", "must name host and port"),
        ("http://", "must name host and port"),
        ("http://x:99999", "is no address"),
        ("http://x:1/?a=b", "parts that mean nothing"),
        ("grpc://x:1/path", "parts that mean nothing"),
    ],
)
def test_wrong_address_is_refused(address: str, message: str) -> None:
    """Said before anything is connected."""
    with pytest.raises(UsageError, match=message):
        read_address(address)


def test_base_url_as_clients_want_it_is_understood() -> None:
    """Whoever copies it from a client's settings has /v1 at its end."""
    assert read_address("http://h:1/v1").path == ""
    assert read_address("http://h:1/api/v1/").path == "/api"
    assert read_address("http://[::1]:1").host == "::1"


def event(arrived_s: float, *token_ids: int, **more: Any) -> tuple[float, Any]:
    """An event of a stream, as the client and the engine make them."""
    return arrived_s, SimpleNamespace(
        token_ids=token_ids, **{"finish_reason": None, "usage": None, **more}
    )


def test_tokens_of_events_are_counted_where_they_came() -> None:
    """An event without tokens (text held back) is no first token; one may hold several."""
    usage = SimpleNamespace(completion_tokens=4)
    events = [event(1.0), event(2.0, 5), event(3.0, 6, 7, 8)]
    last = event(4.0, finish_reason="stop", usage=usage)
    found = EventsReply([*events, last], end_s=5.0).outcome()
    assert (found.first_s, found.last_s, found.tokens, found.lost) == (2.0, 3.0, 4, None)
    assert EventsReply(events, end_s=5.0).outcome().lost == "no finish reason"
    assert EventsReply([], end_s=5.0).outcome().lost == "no finish reason"


# ── The report, from numbers made by hand ──────────────────────────────────────────────────────


def answers(*given: tuple[float, float, float, int]) -> Round:
    """A round of answers: due, first token, end (seconds), tokens."""
    from ortolan.bench.serving.drive import Answered

    return Round(
        [
            Answered(
                LoadRequest("x", 9),
                due_s,
                due_s,
                Outcome(end_s, first_s, end_s, tokens, True, finish_reason="length"),
            )
            for due_s, first_s, end_s, tokens in given
        ],
        client_s=0.5,
    )


def document(*rounds: list[Round]) -> dict[str, Any]:
    names = [f"http://{number}" for number in range(len(rounds))]
    servers = [OpenServer(name, "http", None) for name in names]  # type: ignore[arg-type]  # unused
    results = ServeResults(ServePlan(), servers, dict(zip(names, rounds, strict=True)))
    return serve_document(results, "2000-01-01")


def test_figures_of_a_round_worked_by_hand() -> None:
    """Two answers within ten seconds: 5 + 11 tokens."""
    found = answers((100.0, 101.0, 103.0, 5), (102.0, 105.0, 110.0, 11))
    assert [ttft_s(one) for one in found.answers] == [1, 3]
    assert [token_s(one) for one in found.answers] == [0.5, 0.5]
    (row,) = document([found])["results"]
    assert row["tokens_per_s"]["samples"] == [1.6]
    assert row["requests_per_s"]["median"] == 0.2
    assert row["ttft_ms"] == {"p50": 1000, "p90": 3000, "p99": 3000}
    assert row["end_to_end_ms"] == {"p50": 3000, "p90": 8000, "p99": 8000}
    assert row["client_cores"] == pytest.approx(0.05)
    assert row["ratio"] is None


def test_ratios_are_above_one_where_the_first_server_is_better() -> None:
    """Round by round: twice the tokens per second, a quarter of the wait."""
    ours = answers((0.0, 1.0, 5.0, 10))
    theirs = answers((0.0, 4.0, 10.0, 10))
    rows = document([ours, ours], [theirs, theirs])["results"]
    assert rows[1]["ratio"]["tokens_per_s"]["median"] == 2
    assert rows[1]["ratio"]["ttft"]["median"] == 4


def test_answer_of_one_token_has_no_time_per_token() -> None:
    """There is nothing between its tokens."""
    assert document([answers((0.0, 1.0, 1.0, 1))])["results"][0]["token_ms"] is None
