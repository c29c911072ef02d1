"""A small server in OpenAI's form, on a thread of its own, that also misbehaves as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

# What a server does with its n-th completion, from 0.
Behaviour = Callable[[int], str]


@dataclass
class FakeOpenAi:
    """behaviour: one of the names in `_answer`. pause_s: before every token.

    bodies: what was asked for, in order. most_at_once: completions that ran together.
    """

    behaviour: Behaviour = lambda number: "good"
    pause_s: float = 0.0
    usage: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    most_at_once: int = 0
    unfinished: int = 0  # completions whose client went away
    port: int = 0
    _running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._exchange(reader, writer):
                    await writer.drain()
        finally:  # also when the server ends, or the transport outlives its loop
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line for line in head.split("\r\n") if line.startswith("Content-Length:")]
        body = await reader.readexactly(int(lengths[0].split()[1]) if lengths else 0)
        if head.startswith("GET /v1/models "):
            _write(writer, 200, json.dumps({"data": [{"id": "fake"}]}))
            return True
        assert head.startswith("POST /v1/completions ")
        number = len(self.bodies)
        self.bodies.append(json.loads(body))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            return await self._answer(self.behaviour(number), self.bodies[-1], writer)
        except ConnectionError:
            self.unfinished += 1
            raise
        finally:
            self._running -= 1

    async def _answer(self, name: str, asked: Any, writer: asyncio.StreamWriter) -> bool:
        if name == "status":
            _write(writer, 503, json.dumps({"error": {"message": "come back later"}}))
            return True
        while name == "after a client left" and self.unfinished == 0:
            await asyncio.sleep(0.01)
        if name == "drop at once":
            return False
        if name == "not http":
            writer.write(b"nonsense\r\n\r\n")
            return False
        if name == "not streamed":
            _write(writer, 200, json.dumps({"choices": [{"text": "all", "finish_reason": "stop"}]}))
            return True
        kind = "Connection: close\r\n" if name == "close" else "Transfer-Encoding: chunked\r\n"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{kind}\r\n".encode())
        send = _plain if name == "close" else _chunk
        tokens = asked["max_tokens"]
        for number in range(tokens):
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            last = number == tokens - 1 and name != "no finish"
            choice = {"text": f" w{number}é", "finish_reason": "length" if last else None}
            event = json.dumps({"choices": [choice], "usage": None}, ensure_ascii=False)
            if name == "nonsense event" and number == 1:
                event = "{"
            if name == "error event" and number == 1:
                event = json.dumps({"error": {"message": "the engine broke"}})
            # In two pieces that part a character of two bytes.
            data = f"data: {event}\r\n\r\n".encode()
            for piece in (
                (data[: data.index(b"\xc3") + 1], data[data.index(b"\xc3") + 1 :])
                if (b"\xc3" in data)
                else (data,)
            ):
                writer.write(send(piece))
            await writer.drain()
            if name == "drop" and number == 1:
                return False
            while name == "hang":
                await asyncio.sleep(0.01)
                writer.write(send(b": still there\n\n"))
                await writer.drain()
        if self.usage:
            usage = {"choices": [], "usage": {"completion_tokens": tokens}}
            writer.write(send(f"data: {json.dumps(usage)}\n\n".encode()))
        writer.write(send(b"data: [DONE]\n\n"))
        if name == "close":
            return False
        writer.write(b"0\r\n\r\n")
        return name != "good, then closed"


@contextmanager
def fake_openai(**settings: Any) -> Iterator[FakeOpenAi]:
    """A running one on a free port of the loopback."""
    fake, loop = FakeOpenAi(**settings), asyncio.new_event_loop()
    ready, ending = threading.Event(), asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.port = server.sockets[0].getsockname()[1]
        ready.set()
        await ending.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(30)
        loop.close()


def _write(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    writer.write(
        f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nServer: fake/1\r\n"
        f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(data: bytes) -> bytes:
    return data
