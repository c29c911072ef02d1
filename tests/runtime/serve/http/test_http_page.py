"""The chat page as the server sends it; test_http_page_browser.py has what it does."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

from http_live import Live
from scripted_service import ScriptedService

from ortolan.runtime.serve.http_app import create_app


def test_page_is_one_answer_that_names_no_other_place(server: Live) -> None:
    """A machine without a way out must show it whole, and it must tell nobody that it is used."""
    answered = server.call("GET", "/")
    assert answered.status == 200
    assert answered.headers["content-type"] == "text/html; charset=utf-8"
    page = answered.body.decode().replace("http://www.w3.org/2000/svg", "")  # a name, no address
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", page)
    assert re.findall(r"""(?:src|href|action)=["']([^"']{0,5})""", page) == ["data:"]


def test_policy_lets_nothing_run_but_what_was_sent(server: Live) -> None:
    """An answer of the model is text from anywhere; whatever gets into the page must not run."""
    answered = server.call("GET", "/")
    page, headers = answered.body.decode(), answered.headers
    policy = dict(
        directive.split(" ", 1) for directive in headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    for tag in ("style", "script"):
        parts = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = (base64.b64encode(hashlib.sha256(part.encode()).digest()) for part in parts)
        assert policy[f"{tag}-src"].split() == [f"'sha256-{one.decode()}'" for one in hashes]
    assert not re.search(r"<[^>]+ (?:style|on[a-z]+)=", page)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_page_that_is_off_is_no_path() -> None:
    """Who serves programs alone may not want a page at all."""
    said = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        said.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    app = create_app(ScriptedService(lambda _: []), with_page=False)  # type: ignore[arg-type]
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    assert said[0]["status"] == 404
