"""The chat page at /: one answer that holds its style and scripts, and a policy of their hashes."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ortolan.runtime.serve.http_endpoint import Exchange, send_whole

_FOLDER = Path(__file__).parent / "page"
# How page/chat.html names its parts. The files work on their own too, so that they can be edited.
_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z]+\.js)"></script>')


async def chat_page(exchange: Exchange) -> None:
    """GET /: a page to chat with the model."""
    page, headers = assembled()
    await send_whole(exchange.send, 200, page, "text/html; charset=utf-8", headers)


@cache
def assembled() -> tuple[bytes, dict[str, str]]:
    """The page, and the headers that keep it to itself.

    Only what has one of our hashes is style or script, and only this server can be called. No
    text can become markup: trusted types make the browser refuse that.
    """
    html = (_FOLDER / "chat.html").read_text(encoding="utf-8")
    html = _STYLE.sub(lambda found: f"<style>{_part(found[1])}</style>", html)
    html = _SCRIPT.sub(lambda found: f"<script>{_part(found[1])}</script>", html)
    policy = (
        "default-src 'none'",
        f"style-src {' '.join(_hashes(html, 'style'))}",
        f"script-src {' '.join(_hashes(html, 'script'))}",
        "img-src data:",  # the icon
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return html.encode(), headers


def _part(name: str) -> str:
    text = (_FOLDER / name).read_text(encoding="utf-8")
    assert "</s" not in text.lower(), f"{name} would end its own element"
    return text


def _hashes(html: str, tag: str) -> Iterator[str]:
    """What CSP calls each element of a tag: the SHA-256 of its text."""
    for text in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL):
        digest = hashlib.sha256(text.encode()).digest()
        yield f"'sha256-{base64.b64encode(digest).decode()}'"
