"""Clients that put a server under load, and compare every answer with the one computed alone.

As a program it is a client process for a test to kill: argv is a file as `Load.write` leaves it,
a seed, and how many clients of each protocol it runs until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from ortolan.client import convert
from ortolan.errors import OrtolanError
from ortolan.proto.ortolan.v1.ortolan_pb2_grpc import InferenceServiceStub
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.params import Request, SamplingParams

LEAVING, SLOW = 0.10, 0.05  # parts of all requests
PAUSE_S = 0.03  # of a slow reader, between two reads
SMALL_BUFFER = 4096  # bytes that a slow reader's socket takes in advance


@dataclass
class Heard:
    """What one choice has said."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty over HTTP
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def begins(self, whole: Heard) -> bool:
        """Whether it is a part of `whole` so far, to the bit."""
        return (
            whole.text.startswith(self.text)
            and whole.token_ids[: len(self.token_ids)] == self.token_ids
            and whole.logprobs[: len(self.logprobs)] == self.logprobs
        )

    def is_whole(self, whole: Heard) -> bool:
        """Whether it is all of `whole`, to the bit; token ids count where there are any."""
        return (self.text, self.logprobs, self.finish_reason) == (
            whole.text,
            whole.logprobs,
            whole.finish_reason,
        ) and self.token_ids in ([], whole.token_ids)


@dataclass(frozen=True)
class Question:
    """A prompt with its settings, and the answers of all choices, computed alone."""

    prompt: list[int]
    settings: dict[str, Any]
    whole: list[Heard]


@dataclass(frozen=True)
class Load:
    """Where the servers are, and what is asked. long: for slow readers."""

    grpc: str
    http: str
    questions: list[Question]
    long: list[Question]

    def write(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))


@dataclass(frozen=True)
class Manner:
    """How a client reads: leaves after so many pieces (None: never); pauses before each."""

    leaves_after: int | None = None
    pause_s: float = 0.0


class FaultError(Exception):
    """A stream that did not end as it must."""


# ── What is asked ──────────────────────────────────────────────────────────────────────────────


def questions_of(bundle: Path, count: int, context: int, seed: int) -> list[Question]:
    """Short and long, greedy and not, one and two choices; half begin like others do."""
    rng = random.Random(seed)
    asked = [_random_question(rng, context) for _ in range(count)]
    return answered(bundle, context, asked)


def long_questions_of(bundle: Path, count: int, context: int) -> list[Question]:
    """Answers of many bytes, for readers that do not keep up."""
    settings = {"max_tokens": context // 2, "temperature": 0, "ignore_eos": True, "logprobs": 5}
    asked = [([5 + number, 6, 7, 8], settings) for number in range(count)]
    return answered(bundle, context, asked)


def _random_question(rng: random.Random, context: int) -> tuple[list[int], dict[str, Any]]:
    stem, shared = rng.randrange(4), rng.choice([0, 0, 20, 48, 100])
    prompt = [3 + (7 * i + stem) % 200 for i in range(shared)]
    prompt += [rng.randrange(3, 290) for _ in range(rng.choice([1, 5, 40, 200]))]
    settings: dict[str, Any] = {
        "max_tokens": rng.choice([1, 4, 16, 60, context // 3]),
        "temperature": rng.choice([0.0, 0.8]),
        "seed": rng.randrange(1000),
        "ignore_eos": rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 2]),
    }
    if rng.random() < 0.5:
        settings["logprobs"] = 0
    if rng.random() < 0.2:
        settings["stop"] = ["th"]
    return prompt, settings


def answered(
    bundle: Path, context: int, asked: list[tuple[list[int], dict[str, Any]]]
) -> list[Question]:
    """Each by an engine that runs nothing else and keeps nothing."""
    from ortolan.runtime.engine.opening import open_engine
    from ortolan.runtime.params import EngineConfig
    from ortolan.runtime.text.tokenizer import Tokenizer

    config = EngineConfig(max_slots=2, max_context=context, prefix_cache_mb=0)
    engine = open_engine(Bundle.open(bundle), config, Tokenizer.open(bundle))
    found = []
    for prompt, settings in asked:
        params = SamplingParams(**settings)
        whole = [Heard() for _ in range(params.n)]
        for event in engine.stream(Request(prompt, params)):
            _hear(whole[event.choice], event)
        found.append(Question(prompt, settings, whole))
    return found


def _hear(heard: Heard, event: Any) -> None:
    """Add an event of the engine or of our client."""
    heard.text += event.text
    heard.token_ids += event.token_ids
    heard.logprobs += [position.chosen.logprob for position in event.logprobs]
    heard.finish_reason = event.finish_reason or heard.finish_reason


# ── Asking ─────────────────────────────────────────────────────────────────────────────────────


async def ask_grpc(stub: Any, question: Question, manner: Manner) -> list[Heard]:
    """What was heard until the end, or until the client left. Raises FaultError."""
    heard = [Heard() for _ in question.whole]
    asked = convert.asked_to_generate(question.prompt, dict(question.settings))
    call = stub.Generate(asked.message)
    pieces = 0
    try:
        if manner.leaves_after == 0:
            await call.initial_metadata()
            return heard
        async for message in call:
            event = convert.event_of(message)
            _hear(heard[event.choice], event)
            pieces += 1
            if pieces == manner.leaves_after:
                return heard
            if manner.pause_s:
                await asyncio.sleep(manner.pause_s)
    except grpc.RpcError as error:
        raise FaultError(f"gRPC {error.code().name}: {error.details()}") from error
    finally:
        call.cancel()
    return heard


async def ask_http(address: str, question: Question, manner: Manner) -> list[Heard]:
    """The same over HTTP, on a connection of its own; without a stream there is one piece."""
    heard = [Heard() for _ in question.whole]
    stream = manner.pause_s > 0 or manner.leaves_after is not None or len(question.prompt) % 4 > 0
    body = json.dumps({"prompt": question.prompt, "stream": stream, **question.settings})
    ended, pieces = False, 0
    async with aclosing(_http_pieces(address, body.encode(), manner)) as arriving:
        async for piece in arriving:
            if pieces == manner.leaves_after:
                return heard
            pieces += 1
            for data in _objects(piece) if stream else [piece]:
                if data == b"[DONE]":
                    ended = True
                    continue
                _hear_choices(heard, json.loads(data))
    if stream and not ended:
        raise FaultError("HTTP: a stream without [DONE]")
    return heard


def _objects(piece: bytes) -> list[bytes]:
    """The data of the events in a piece, which the server writes whole."""
    return [event.removeprefix(b"data: ") for event in piece.split(b"\n\n") if event]


def _hear_choices(heard: list[Heard], answer: dict[str, Any]) -> None:
    if "error" in answer:
        raise FaultError(f"HTTP: {answer['error']['message']}")
    for choice in answer["choices"]:
        one = heard[choice["index"]]
        one.text += choice["text"]
        one.finish_reason = choice["finish_reason"] or one.finish_reason
        one.logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]


async def _http_pieces(address: str, body: bytes, manner: Manner) -> AsyncIterator[bytes]:
    """The chunks of an answer, or its whole body. Raises FaultError for another status than 200."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    if manner.pause_s:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=SMALL_BUFFER)
    except OSError as error:
        connection.close()
        raise FaultError(f"HTTP: not connected ({error})") from error
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        status = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" not in status:
            whole = await reader.read(-1)
            if not status.startswith(b"http/1.1 200"):
                raise FaultError(f"HTTP: status {status[9:12].decode()}: {whole[:200]!r}")
            yield whole
            return
        while size := int(await reader.readuntil(b"\r\n"), 16):
            if manner.pause_s:
                await asyncio.sleep(manner.pause_s)
            yield (await reader.readexactly(size + 2))[:-2]
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise FaultError(f"HTTP: the connection broke ({type(error).__name__})") from error
    finally:
        writer.transport.abort()


# ── Clients ────────────────────────────────────────────────────────────────────────────────────


def _manner(rng: random.Random) -> Manner:
    kind = rng.random()
    if kind < LEAVING:
        return Manner(leaves_after=rng.choice([0, 0, 1, 3, 20]))
    return Manner(pause_s=PAUSE_S) if kind < LEAVING + SLOW else Manner()


async def one_request(load: Load, stub: Any, rng: random.Random, ends: Counter[str]) -> None:
    """Ask once, over HTTP where there is no stub, and count how it ended."""
    manner = _manner(rng)
    question = rng.choice(load.long if manner.pause_s else load.questions)
    try:
        if stub is None:
            heard = await ask_http(load.http, question, manner)
        else:
            heard = await ask_grpc(stub, question, manner)
    except (FaultError, OrtolanError) as fault:
        ends[f"fault: {fault}"] += 1
        return
    pairs = list(zip(heard, question.whole, strict=True))
    if all(one.is_whole(whole) for one, whole in pairs):
        ends["slow" if manner.pause_s else "finished"] += 1
    elif manner.leaves_after is not None and all(one.begins(whole) for one, whole in pairs):
        ends["left"] += 1
    else:
        ends["fault: another answer than the one computed alone"] += 1


async def clients(
    load: Load, each: int, seed: int, go_on: Callable[[], bool], ends: Counter[str]
) -> None:
    """`each` clients over gRPC, on two connections, and as many over HTTP, one request each at a
    time as long as `go_on` says so.
    """
    channels = [
        grpc.aio.insecure_channel(load.grpc, options=(("grpc.use_local_subchannel_pool", 1),))
        for _ in range(2)
    ]

    async def client(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        stub = InferenceServiceStub(channels[number % 2]) if number < each else None
        while go_on():
            await one_request(load, stub, rng, ends)

    try:
        await asyncio.gather(*(client(number) for number in range(2 * each)))
    finally:
        for channel in channels:
            await channel.close()


def main() -> None:
    path, seed, each = sys.argv[1:]
    load: Load = pickle.loads(Path(path).read_bytes())
    ends: Counter[str] = Counter()

    async def tell() -> None:
        while True:
            await asyncio.sleep(0.5)
            print(json.dumps(ends), flush=True)  # noqa: T201  (a test reads the last line)

    async def run() -> None:
        telling = asyncio.create_task(tell())
        await clients(load, int(each), int(seed), lambda: True, ends)
        telling.cancel()

    asyncio.run(run())


if __name__ == "__main__":
    # Under its own name, so that what was pickled there is found.
    import load_clients

    load_clients.main()
