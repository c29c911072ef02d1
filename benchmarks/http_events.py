"""What an event costs on its way to an HTTP client: CPU time of the server without an engine.

    python benchmarks/http_events.py [--clients 16] [--steps 400] [--pace 100]

A thread plays the engine: `--pace` times a second it gives every stream a token. The clients are
a process of their own, and read and forget. Printed are the microseconds of the server's CPU time
per event, all threads and the kernel's part in sending included, less what the same takes where
coroutines read the streams and forget.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

from ortolan.runtime.engine.async_engine import AsyncStream
from ortolan.runtime.params import Request, SamplingParams, TokenEvent, Usage
from ortolan.runtime.serve.http_app import create_app
from ortolan.runtime.serve.http_server import HttpServer

BODY = {"messages": [{"role": "user", "content": "x"}], "stream": True}


class Player:
    """As much of a Service as streaming needs."""

    def __init__(self, clients: int) -> None:
        self.name = "played"
        self.not_ready = None
        self.tokenizer = SimpleNamespace()
        self.streams: list[AsyncStream] = []
        self.complete = asyncio.Event()
        self._clients = clients

    def check_ready(self) -> None:
        """Always."""

    def params(self, **given: Any) -> SamplingParams:
        return SamplingParams(**given)

    async def encode_chat(self, messages: object) -> list[int]:
        return [1]

    async def submit(self, request: Request) -> AsyncStream:
        self.streams.append(AsyncStream(asyncio.get_running_loop(), lambda: None))
        if len(self.streams) == self._clients:
            self.complete.set()
        return self.streams[-1]

    def play(self, steps: int, pace: float) -> None:
        """Events for all streams, told to the loop once per step as the engine does."""
        began = time.monotonic()
        loop = self.streams[0].loop
        for step in range(1, steps + 1):
            last = step == steps
            for stream in self.streams:
                usage = Usage(1, steps) if last else None
                stream.put(TokenEvent(" word", (7,), "length" if last else None, usage))
                if last:
                    stream.end(None)
            told = [stream for stream in self.streams if stream.wake_reader()]
            loop.call_soon_threadsafe(lambda told=told: [stream.tell() for stream in told])
            time.sleep(max(0.0, began + step / pace - time.monotonic()))


def read(port: int, clients: int) -> None:
    """Each client on a thread, which sleeps while there is nothing to read."""

    def one() -> None:
        data = json.dumps(BODY).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(data), data)
            )
            while connection.recv(65536):
                pass

    threads = [threading.Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def measure(clients: int, steps: int, pace: float) -> float:
    """CPU seconds of playing, with readers."""
    player = Player(clients)
    server = HttpServer(create_app(player), "127.0.0.1", 0)  # type: ignore[arg-type]
    port = await server.start()
    readers = multiprocessing.get_context("spawn").Process(target=read, args=(port, clients))
    readers.start()
    await player.complete.wait()
    began = time.process_time()
    await asyncio.to_thread(player.play, steps, pace)
    await asyncio.to_thread(readers.join)
    spent = time.process_time() - began
    await server.stop(1.0)
    return spent


async def without_http(clients: int, steps: int, pace: float) -> float:
    """CPU seconds of playing to coroutines that read and forget."""
    player = Player(clients)
    for _ in range(clients):
        await player.submit(Request([1], SamplingParams()))

    async def forget(stream: AsyncStream) -> None:
        async for _ in stream:
            pass

    began = time.process_time()
    playing = asyncio.to_thread(player.play, steps, pace)
    await asyncio.gather(playing, *map(forget, player.streams))
    return time.process_time() - began


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pace", type=float, default=100.0)
    given = parser.parse_args()
    settings = (given.clients, given.steps, given.pace)
    spent, base = asyncio.run(measure(*settings)), asyncio.run(without_http(*settings))
    each_us = (spent - base) / (given.clients * given.steps) * 1e6
    print(f"{each_us:.1f} us per event ({spent:.2f} s, {base:.2f} s without HTTP)")


if __name__ == "__main__":
    main()
