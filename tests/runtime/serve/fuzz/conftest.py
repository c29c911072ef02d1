"""A real server on a tiny model, with a question whose answer must stay the same through it all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("starlette")

import grpc
from load_clients import Manner, answered, ask_grpc, ask_http
from serve_process import Served

from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1.ortolan_pb2_grpc import InferenceServiceStub


@pytest.fixture(scope="session")
def fuzz_seconds() -> float:
    """How long to go on; ORTOLAN_FUZZ_SECONDS says otherwise."""
    return float(os.environ.get("ORTOLAN_FUZZ_SECONDS", "60"))


@pytest.fixture
def fuzzed(tiny_bundle: Path, tmp_path: Path) -> Iterator[Served]:
    """The server. At the end it must be idle, alive and exact, and stop in order."""
    settings = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    (canary,) = answered(tiny_bundle, 64, [([5, 6, 7, 8, 9] * 4, settings)])

    async def ask(served: Served) -> None:
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            stub = InferenceServiceStub(channel)
            while (stats := await stub.Stats(pb.StatsRequest())).running + stats.waiting:
                await asyncio.sleep(0.05)
            assert (stats.kv_tokens, stats.not_ready) == (0, "")
            for _ in range(2):  # without a cached prefix, and with one
                assert (await ask_grpc(stub, canary, Manner()))[0].is_whole(canary.whole[0])
                assert (await ask_http(served.http, canary, Manner()))[0].is_whole(canary.whole[0])

    check: Callable[[Served], None] = lambda served: asyncio.run(  # noqa: E731
        asyncio.wait_for(ask(served), 60)
    )
    with Served(tiny_bundle, tmp_path, "--max-slots", "8") as served:
        check(served)
        yield served
        assert served.process.poll() is None, served.said
        check(served)
        assert served.stop(signal.SIGTERM) == 0
        for said in ("Traceback", "unexpectedly", "never retrieved"):
            assert said not in served.said, served.said
