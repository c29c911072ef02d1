"""A headless Chromium, driven over its own debugging pipe: nothing to install besides it.

Source: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 30.0
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
# Chromium reads commands from descriptor 3 and writes to 4. The pipe's may be these, in any order.
_PUT_ON_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


def find_chromium() -> str | None:
    """The browser's program: ORTOLAN_CHROMIUM, or what is on the path."""
    named = os.environ.get("ORTOLAN_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, params, self._session)

    @property
    def complaints(self) -> list[str]:
        """What the browser said of it: exceptions, broken policies; not an answer's status."""
        found = []
        for event in self._events():
            if event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    found.append(entry["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
        return found

    @property
    def requested(self) -> list[str]:
        """Addresses of all that the page asked for."""
        sent = (one for one in self._events() if one["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def forget(self) -> None:
        """From now on there has been nothing."""
        self._events()
        self._browser.events.clear()

    def _events(self) -> list[dict[str, Any]]:
        self.send("Runtime.evaluate", expression="0")  # what came before its answer has arrived
        return [event for event in self._browser.events if event["sessionId"] == self._session]

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({url!r})")

    def js(self, expression: str) -> Any:
        """The value of an expression, which may be a promise."""
        found = self.send(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Returns when a JavaScript condition holds; fails the test if it does not in time."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"it did not come to pass: {condition}"
            time.sleep(0.01)

    def text(self, selector: str) -> str:
        """All text of the elements that a selector finds, as people see it."""
        found = f"[...document.querySelectorAll({selector!r})].map(e => e.innerText).join('|')"
        return str(self.js(found))

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = _KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """A real click, which lands on whatever lies on top there."""
        box = self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); "
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        common = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **common)

    def look(self, *, dark: bool = False, width: int = 1100, height: int = 760) -> None:
        """What the reader's system prefers, and the window's size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


class Browser:
    """The process and its pipe: messages are JSON, each with a zero byte behind it."""

    def __init__(self, program: str, profile: Path, options: Sequence[str] = ()) -> None:
        hears, self._write = os.pipe()
        self._read, says = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _PUT_ON_3_AND_4, str(hears), str(says), program),
                *("--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
                *("--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
                "--no-sandbox",  # which root cannot have; the only pages are our own
                *options,
                "about:blank",
            ],
            pass_fds=(hears, says),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(hears)
        os.close(says)
        self.events: list[dict[str, Any]] = []
        self._rest = b""
        self._number = 0

    def send(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """A command's result. What happens meanwhile is added to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while (received := self._receive(deadline)).get("id") != self._number:
            if "sessionId" in received:
                self.events.append(received)
        assert "error" not in received, f"{method}: {received['error']}"
        result: dict[str, Any] = received["result"]
        return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left_s = max(deadline - time.monotonic(), 0)
            assert select.select([self._read], [], [], left_s)[0], "the browser does not answer"
            read = os.read(self._read, 1 << 20)
            assert read, "the browser ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received

    def page(self) -> Page:
        """A new tab, which shares no storage with others."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = {"url": "about:blank", "browserContextId": context}
        made = self.send("Target.createTarget", target)["targetId"]
        attached = self.send("Target.attachToTarget", {"targetId": made, "flatten": True})
        return Page(self, attached["sessionId"])

    def close(self) -> None:
        os.close(self._write)  # which it takes for the end
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)


@contextmanager
def browser(program: str, profile: Path, options: Sequence[str] = ()) -> Iterator[Browser]:
    """A browser with a fresh profile, ended at the end."""
    running = Browser(program, profile, options)
    try:
        yield running
    finally:
        running.close()
