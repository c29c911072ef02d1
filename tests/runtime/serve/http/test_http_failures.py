"""What the service raises, as clients are told of it; and what of requests is in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from http_live import Live, http_request, live, read_all
from scripted_service import Script, ScriptedService

from ortolan.errors import (
    CancelledError,
    EngineError,
    OrtolanError,
    OverloadedError,
    TemplateError,
    TimedOutError,
)
from ortolan.runtime.params import Request, TokenEvent, Usage
from ortolan.runtime.serve.http_body import HttpLimits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SECRET = "a-secret-that-nobody-may-repeat"


def chat(server: Live, **fields: Any) -> Any:
    return server.post(CHAT, {"messages": HELLO, "max_tokens": 2, **fields})


def complete(server: Live, **fields: Any) -> Any:
    return server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 2, **fields})


# ── What the service raises ────────────────────────────────────────────────────────────────────


@contextmanager
def scripted(script: Script, limits: HttpLimits | None = None) -> Iterator[Live]:
    with live(ScriptedService(script), limits) as server:
        yield server


def raising(error: OrtolanError) -> Script:
    def script(request: Request) -> Any:
        raise error

    return script


@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (OverloadedError("8 requests are waiting", 2.5), 429, ("retry-after", "3")),
        (TemplateError("roles must alternate"), 400, None),
        (TimedOutError("the request's time is over"), 504, ("x-should-retry", "false")),
        (CancelledError("the engine was closed"), 503, None),
        (EngineError("the logits are not finite"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_a_status(
    error: OrtolanError, status: int, header: tuple[str, str] | None, stream: bool
) -> None:
    """Clients decide by the status whether to try again, also for a stream."""
    for script in (raising(error), lambda _: [error]):
        with scripted(script) as server:
            answered = server.post(COMPLETIONS, {"prompt": "x", "stream": stream})
            assert answered.status == status
            assert answered.error["message"] == str(error)
            if header is not None:
                assert answered.headers[header[0]] == header[1]


def test_errors_do_not_say_where_the_bundle_lies() -> None:
    """The server's folders are no business of its clients."""
    with scripted(raising(TemplateError("/nowhere has no chat template"))) as server:
        message = server.post(CHAT, {"messages": HELLO}).error["message"]
    assert message == "scripted has no chat template"


def test_failure_in_mid_stream_is_an_event(client: openai.OpenAI) -> None:
    """vllm#52852: a stream that just stops looks like an answer that is complete."""
    begun = [TokenEvent("Par", (7,)), EngineError("the logits are not finite")]
    with scripted(lambda _: begun) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as other:
            stream = other.completions.create(model="scripted", prompt="x", stream=True)
            assert next(stream).choices[0].text == "Par"
            with pytest.raises(openai.APIError, match="not finite"):
                next(stream)
        body = server.post(COMPLETIONS, {"prompt": "x", "stream": True}).body
        assert body.endswith(b"}}\n\n")
        assert b"[DONE]" not in body


def test_broken_engine_is_unavailable() -> None:
    """A load balancer tries another server at 503, and readiness says the same."""
    with scripted(raising(EngineError("gone"))) as server:
        assert server.call("GET", "/health/ready").json == {"status": "ready"}
        server.service.not_ready = "the engine stopped working: bits fell out"
        answered = server.post(COMPLETIONS, {"prompt": "x"})
        assert (answered.status, answered.error["message"]) == (503, server.service.not_ready)
        ready = server.call("GET", "/health/ready")
        assert (ready.status, ready.json["reason"]) == (503, server.service.not_ready)
        assert server.call("GET", "/health/live").status == 200


def test_fault_of_ours_says_and_logs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    """An exception quotes what it choked on, which may be somebody's prompt."""

    def script(request: Request) -> Any:
        raise KeyError(SECRET)

    with scripted(script) as server, caplog.at_level(logging.DEBUG):
        answered = server.post(COMPLETIONS, {"prompt": SECRET}, {"X-Request-Id": "abc-1"})
    assert answered.status == 500
    assert "abc-1" in answered.error["message"]
    assert "abc-1 failed: KeyError" in caplog.text
    assert SECRET not in caplog.text + answered.body.decode()


def test_one_refused_prompt_gives_the_others_back() -> None:
    """All of a batch or nothing: what was admitted must not run for nobody."""

    def script(request: Request) -> Any:
        if list(request.prompt_ids) == [9]:
            raise OverloadedError("full", 1)
        return [TokenEvent("a", (1,))]

    with scripted(script) as server:
        assert server.post(COMPLETIONS, {"prompt": [[5], [6], [9]]}).status == 429
        assert (server.service.cancelled, server.service.streams) == (2, [])


# ── Request ids ────────────────────────────────────────────────────────────────────────────────


def test_request_id_is_taken_or_made(server: Live) -> None:
    """Two sides' logs meet by it, so it must be safe to print; nothing else hangs on it."""
    ready = "/health/ready"
    given = {"X-Request-Id": "client:7_a.b-c"}
    assert server.call("GET", ready, headers=given).headers["x-request-id"] == "client:7_a.b-c"
    made = set()
    for bad in ("", "a b", "x" * 129, "é"):
        answered = server.call("GET", ready, headers={"X-Request-Id": bad})
        made.add(answered.headers["x-request-id"])
    assert len(made) == 4
    assert all(len(name) == 32 for name in made)
    assert (
        server.call("GET", "/nowhere", headers=given).headers["x-request-id"]
        == given["X-Request-Id"]
    )


def test_equal_request_ids_do_not_meet() -> None:
    """vllm#10583: a client's id names nothing here."""
    done = TokenEvent("a", (1,), "stop", Usage(1, 1))
    with scripted(lambda _: [done]) as server:
        same = {"X-Request-Id": "same"}
        ids = {server.post(COMPLETIONS, {"prompt": "x"}, same).json["id"] for _ in range(3)}
    assert len(ids) == 3


def test_prompts_are_not_logged(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A log is read by more people than a conversation."""
    with caplog.at_level(logging.DEBUG):
        complete(server, prompt=SECRET)
        chat(server, messages=[{"role": "user", "content": SECRET}], stream=True)
        with server.raw(http_request(COMPLETIONS, {"prompt": SECRET}) + b"\0" * 10) as raw:
            read_all(raw)
    assert SECRET not in caplog.text


def test_document_lists_what_is_checked(server: Live) -> None:
    """The page and the checks come from one table; a route without a description is a fault."""
    found = server.call("GET", "/openapi.json").json
    properties = found["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]["properties"]
    for name in properties:
        assert chat(server, **{name: object_of_no_use()}).error["param"] == name
    for path, methods in found["paths"].items():
        (method,) = methods
        answered = server.call(method.upper(), path.replace("{id}", "tiny"), b"{}")
        assert answered.status in (200, 400), path
    page = server.call("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert b"max_completion_tokens" in page.body
    assert b"http:" not in page.body.replace(b"Ortolan: HTTP", b"")
    assert b"https:" not in page.body
    json.dumps(found)


def object_of_no_use() -> dict[str, Any]:
    """A value that no field takes."""
    return {"no": ["use"]}
