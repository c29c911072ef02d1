"""An HTTP/1.1 response taken apart as it arrives. Source: RFC 9112."""

from __future__ import annotations

_MOST_HEAD_BYTES = 64 << 10


class MalformedError(Exception):
    """What arrived is no HTTP/1.1 response."""


class Response:
    """One response. Bytes in, pieces of its body out; works on nothing that it need not look at.

    status: 0 until the head is complete. headers: names in lower case, the last of equal ones.
    done: the body is complete. keeps_open: the connection can take another request then.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._buffer = b""
        self._chunked = False
        self._left: int | None = None  # bytes of the body or the chunk; None: until the end
        self._in_trailer = False

    @property
    def keeps_open(self) -> bool:
        return "close" not in self.headers.get("connection", "").lower() and self._left is not None

    def feed(self, data: bytes) -> bytes:
        """The part of the body in `data`, maybe empty. Raises MalformedError."""
        if self.status == 0:
            self._buffer += data
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MOST_HEAD_BYTES:
                    raise MalformedError("its head does not end")
                return b""
            head, data = self._buffer[:end], self._buffer[end + 4 :]
            self._buffer = b""
            self._read_head(head)
            if self.status == 0:  # an interim response: the real one follows
                return self.feed(data)
        if self._chunked:
            return self._unchunk(data)
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.done = self._left == 0
        return body

    def feed_end(self) -> None:
        """The connection was closed: a body without a stated length ends so."""
        if self.status and not self._chunked and self._left is None:
            self.done = True

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        status = rest[:3]
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise MalformedError(f"it begins with {first[:40]!r}")
        if status[0] == "1":
            return
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.status = int(status)
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._chunked:
            self._left = 0
        elif (length := self.headers.get("content-length")) is not None:
            if not length.isdecimal():
                raise MalformedError(f"its Content-Length is {length[:40]!r}")
            self._left = int(length)
            self.done = self._left == 0

    def _unchunk(self, data: bytes) -> bytes:
        data, pieces = self._buffer + data, []
        while data and not self.done:
            if self._left:
                piece = data[: self._left]
                data = data[len(piece) :]
                self._left -= len(piece)
                pieces.append(piece)
                continue
            line, newline, rest = data.partition(b"\r\n")
            if not newline:
                if len(data) > _MOST_HEAD_BYTES:
                    raise MalformedError("a chunk's size does not end")
                break
            data = rest
            if self._in_trailer:
                self.done = not line
            elif line:  # else the line break after a chunk
                self._left = _chunk_size(line)
                self._in_trailer = self._left == 0
        self._buffer = data
        return b"".join(pieces)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise MalformedError(f"a chunk's size is {line[:20]!r}") from None
