"""What a served model's log says, and what it must never say."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from http_live import Live, wait_until

from ortolan.client.sync import Client
from ortolan.errors import OrtolanError
from ortolan.runtime.serve.grpc_server import GrpcServer

WORDS = ("xylophone", "quixotic", "zanzibar", "8c5f2b-secret-key")
TEXT = f"The {WORDS[0]} is {WORDS[1]} in {WORDS[2]}"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """All that any logger says, from debug on."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="ortolan")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of all finished calls."""
    return [vars(record) for record in log.records if record.getMessage() == "call finished"]


def one_line(log: pytest.LogCaptureFixture, request_id: str) -> dict[str, Any]:
    """The fields of the one line about a call, which is the only one."""

    def found() -> list[dict[str, Any]]:
        return [line for line in lines(log) if line["request_id"] == request_id]

    wait_until(lambda: bool(found()))
    (line,) = found()
    return line


def test_a_finished_request_is_one_line_with_its_numbers(
    server: Live, log: pytest.LogCaptureFixture
) -> None:
    """Whoever complains about an answer gives its id; the line says what it cost, and when."""
    body = {"prompt": [TEXT, TEXT], "max_tokens": 3, "n": 2, "ignore_eos": True}
    server.post("/v1/completions", body, {"x-request-id": "mine-1"})
    line = one_line(log, "mine-1")
    assert line["levelname"] == "INFO"
    assert (line["protocol"], line["route"], line["status"]) == ("http", "/v1/completions", "200")
    assert line["model"] == "tiny"
    assert line["finish_reasons"] == ["length"] * 4
    assert line["completion_tokens"] == 12
    assert line["prompt_tokens"] > 10
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert "tenant" not in line


def test_client_that_left_has_a_line_with_what_became_of_its_request(
    server: Live, log: pytest.LogCaptureFixture
) -> None:
    """Clients that give up are the first sign of answers that come too late."""
    body = json.dumps({"prompt": [5], "max_tokens": 2000, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-Request-Id: gone-1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with server.raw(head.encode() + body):
        wait_until(lambda: server.service.stats().running == 1)
    line = one_line(log, "gone-1")
    assert (line["status"], line["finish_reasons"]) == ("499", ["cancelled"])


def test_probes_are_not_in_the_way(server: Live, log: pytest.LogCaptureFixture) -> None:
    """An orchestrator asks every second."""
    for path in ("/health/live", "/health/ready", "/metrics"):
        server.call("GET", path, headers={"x-request-id": path.strip("/").replace("/", ".")})
    for name in ("health.live", "health.ready", "metrics"):
        assert one_line(log, name)["levelname"] == "DEBUG"


def test_no_prompt_answer_or_key_is_ever_logged(
    server: Live, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs are kept, copied and read by people whom the user never met."""
    key = {"Authorization": f"Bearer {WORDS[3]}"}
    answers: list[str] = []

    def post(path: str, body: object) -> None:
        answers.append(server.post(path, body, key).body.decode())

    chat = [{"role": "user", "content": TEXT}]
    few: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    post("/v1/completions", {"prompt": TEXT, **few, "echo": True, "logprobs": 2})
    post("/v1/completions", {"prompt": TEXT, **few, "stream": True})
    post("/v1/completions", {"prompt": TEXT, "temperature": -1})
    post("/v1/completions", {"prompt": TEXT, "stop": ["", TEXT]})
    post("/v1/completions", {"prompt": {"text": TEXT}})
    post("/v1/completions", {"prompt": TEXT * 1000})
    post("/v1/completions", TEXT.encode())
    post("/v1/nothing", {WORDS[1]: TEXT, "model": WORDS[2]})
    post("/v1/chat/completions", {"messages": chat, **few})
    post("/v1/chat/completions", {"messages": [{"role": TEXT, "content": TEXT}]})
    post("/tokenize", {"prompt": TEXT})

    def fault(*_: object, **__: object) -> None:
        raise ValueError(TEXT)  # as parsers do, which quote what they choke on

    grpc_server = server.run(_started(server.service))
    with Client(f"127.0.0.1:{grpc_server[1]}") as client:
        client.generate(TEXT, **few)
        for settings in ({"stop": [TEXT, ""]}, {"top_p": 7.0}):
            with pytest.raises(OrtolanError):
                client.generate(TEXT, **settings)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(server.service._prompts, "encode", fault)
            post("/v1/completions", {"prompt": TEXT})
            with pytest.raises(OrtolanError):
                client.generate(TEXT, **few)
    server.run(grpc_server[0].stop(0))

    assert len(lines(log)) >= 15
    formatter = logging.Formatter()
    said = "\n".join(f"{formatter.format(r)} {vars(r)!r}" for r in log.records)
    for word in WORDS:
        assert word not in said
    generated = [json.loads(text)["choices"][0] for text in (answers[0], answers[8])]
    for choice in generated:
        text = choice.get("text") or choice["message"]["content"]
        assert text.removeprefix(TEXT) not in said


async def _started(service: Any) -> tuple[GrpcServer, int]:
    server = GrpcServer(service, "127.0.0.1", 0)
    return server, await server.start()
