"""A stand-in for the Hugging Face Hub on the loopback: what huggingface_hub 2.4 asks, no more."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

STALL_S = 20.0


@dataclass
class FakeHub:
    """revisions: "org/name" -> revision -> folder. gated: names that nobody may read.

    drop: the connection breaks half way through this file, once. stall: this file stops half way,
    once, and `stalled` is set. ranges: what GETs asked for, in their order, by file.
    """

    revisions: dict[str, dict[str, Path]]
    gated: set[str] = field(default_factory=set)
    drop: str | None = None
    stall: str | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def commit(self, name: str, revision: str) -> str:
        """A commit's hash, made up."""
        return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()

    def folder(self, name: str, revision: str) -> Path | None:
        """By a revision's name, or by its commit."""
        for known, folder in self.revisions[name].items():
            if revision in (known, self.commit(name, known)):
                return folder
        return None


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Runs it until the block ends, on a port of its own."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a client that is killed is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 6:
            self._api("/".join(parts[2:4]), parts[4], parts[5])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET  # noqa: N815  (the name that the library calls)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its name there)
        """Nothing: the test's output is not the place."""

    def _known(self, name: str, revision: str) -> Path | None:
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif name not in self.hub.revisions:
            self._refuse(401, "RepoNotFound")  # the Hub does not tell private from absent
        elif (folder := self.hub.folder(name, revision)) is None:
            self._refuse(404, "RevisionNotFound")
        else:
            return folder
        return None

    def _api(self, name: str, what: str, revision: str) -> None:
        folder = self._known(name, revision)
        if folder is None:
            return
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if what == "tree":
            self._json(
                [
                    {
                        "type": "file",
                        "path": file.relative_to(folder).as_posix(),
                        "size": file.stat().st_size,
                        "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                    }
                    for file in files
                ]
            )
        else:
            known = next(k for k, v in self.hub.revisions[name].items() if v == folder)
            self._json({"id": name, "sha": self.hub.commit(name, known), "siblings": []})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        folder = self._known(name, revision)
        if folder is None:
            return
        path = folder / file
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        body, asked = path.read_bytes(), self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if self.command == "GET":
            self.hub.ranges.append((file, asked))
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", revision)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file == self.hub.stall and not self.hub.stalled.is_set():
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.released.wait(STALL_S)
            self.close_connection = True
        elif file == self.hub.drop:
            self.hub.drop = None
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body[start:])

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"refused: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()
