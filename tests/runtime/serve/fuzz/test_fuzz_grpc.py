"""Random bytes, random messages and damaged ones, on every method that the server has."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from random_messages import mutated, random_message
from serve_process import Served

from ortolan.runtime.serve import grpc_server  # noqa: F401  (puts all its messages into the pool)

CODE = grpc.StatusCode
INTERNAL = {CODE.INTERNAL, CODE.UNKNOWN, CODE.DATA_LOSS, CODE.UNAVAILABLE}
SEED = 20_261
AT_ONCE = 8
LONGEST_S = 0.5  # of one call; watching health has no end of its own


@dataclass(frozen=True)
class Method:
    """One of the server's, as the wire has it."""

    path: str
    asked: type[Message]
    client_streams: bool
    server_streams: bool


async def methods(channel: Any) -> list[Method]:
    """All that reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (listed,) = [answer async for answer in stub.ServerReflectionInfo(iter([asked]))]
    return [
        Method(
            f"/{service.name}/{method.name}",
            GetMessageClass(method.input_type),
            method.client_streaming,
            method.server_streaming,
        )
        for service in listed.list_services_response.service
        for method in Default().FindServiceByName(service.name).methods
    ]


def random_bytes(rng: random.Random, kind: type[Message]) -> bytes:
    """What no client should send, or what any might."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.choice([0, 1, 2, 10, 100, 5000]))
        case 1 | 2:
            return random_message(rng, kind).SerializeToString()
    return mutated(rng, random_message(rng, kind).SerializeToString())


async def code_of(channel: Any, method: Method, data: bytes) -> grpc.StatusCode:
    """How a call with these bytes ends; one that goes on is cancelled after a while."""
    asks = "stream" if method.client_streams else "unary"
    answers = "stream" if method.server_streams else "unary"
    made = getattr(channel, f"{asks}_{answers}")(method.path)  # bytes in, bytes out
    call = made(iter([data]) if method.client_streams else data, timeout=LONGEST_S)
    try:
        if method.server_streams:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return CODE.OK


async def fuzz(address: str, seconds: float) -> Counter[tuple[str, str]]:
    """Calls until time is over; how each method's ended. Stops at the first internal error."""
    until, codes = time.monotonic() + seconds, Counter[tuple[str, str]]()
    numbers = itertools.count()
    async with grpc.aio.insecure_channel(address) as channel:
        served = await methods(channel)
        assert len(served) > 8

        async def client() -> None:
            while time.monotonic() < until:
                number = next(numbers)
                rng = random.Random(SEED + number)
                method = rng.choice(served)
                data = random_bytes(rng, method.asked)
                code = await code_of(channel, method, data)
                codes[method.path, code.name] += 1
                assert code not in INTERNAL, f"{method.path}, seed {SEED + number}: {data!r}"

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(client())
    return codes


@pytest.mark.slow
def test_no_bytes_are_an_internal_error(fuzzed: Served, fuzz_seconds: float) -> None:
    """Whoever can reach the port can send anything; it must cost them a refusal, and nobody else
    anything. The server is exact afterwards, which `fuzzed` checks.
    """
    codes = asyncio.run(fuzz(fuzzed.grpc, fuzz_seconds))
    # It reached the inside: most methods were called with success too, all of them in vain.
    succeeded = {path for path, code in codes if code == "OK"}
    assert "/ortolan.v1.InferenceService/Generate" in succeeded, codes
    assert codes["/ortolan.v1.InferenceService/Generate", "INVALID_ARGUMENT"], codes
