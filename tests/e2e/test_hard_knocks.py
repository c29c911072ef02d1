"""What happens to real servers: signals under load, full disks, too few descriptors, a twin."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("starlette")
pytest.importorskip("resource", reason="limits and signals are POSIX's")

import resource

import grpc
from load_clients import FaultError, Heard, Manner, Question, answered, ask_grpc, ask_http
from serve_process import Served, wait_until

from ortolan.graphs.manifest import PACKED_NAME
from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1.ortolan_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.slow

CONTEXT = 8192
NOT_PACKED = "the packed cache cannot be written"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers may take many seconds. Nothing is packed in it yet."""
    pytest.importorskip("gguf")
    from tiny_llama import export_long

    return export_long(tmp_path_factory.mktemp("long"), CONTEXT)


@pytest.fixture(scope="module")
def question(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Question:
    """One with a short answer, computed alone, on a copy of the bundle."""
    copy = tmp_path_factory.mktemp("alone") / "tiny"
    shutil.copytree(bundle, copy)
    settings = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    (found,) = answered(copy, 256, [([5, 6, 7, 8, 9], settings)])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[], Path]:
    """New folders, for servers of one test."""
    numbers = iter(range(9))

    def new() -> Path:
        made = tmp_path / f"server-{next(numbers)}"
        made.mkdir()
        return made

    return new


def ask_both(served: Served, question: Question) -> None:
    """Both servers give the answer computed alone."""

    async def ask() -> None:
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            stub = InferenceServiceStub(channel)
            for heard in (
                await ask_grpc(stub, question, Manner()),
                await ask_http(served.http, question, Manner()),
            ):
                assert heard[0].is_whole(question.whole[0])

    asyncio.run(asyncio.wait_for(ask(), 60))


async def ends_of(
    served: Served, count: int, max_tokens: int, then: Callable[[], Any]
) -> list[str]:
    """How `count` streams over each protocol end, in the midst of which `then` is called."""
    settings = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    asked = Question([5, 6, 7], settings, [Heard()])
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        stub = InferenceServiceStub(channel)

        async def one(over_grpc: bool) -> str:
            try:
                if over_grpc:
                    (heard,) = await ask_grpc(stub, asked, Manner())
                else:
                    (heard,) = await ask_http(served.http, asked, Manner())
            except FaultError as fault:
                return str(fault)
            assert heard.finish_reason is not None, "a stream that ended without a word"
            return heard.finish_reason

        running = [asyncio.create_task(one(number % 2 == 0)) for number in range(2 * count)]
        while (stats := await stub.Stats(pb.StatsRequest())).running + stats.waiting < 2 * count:
            await asyncio.sleep(0.01)
        then()
        return list(await asyncio.gather(*running))


@pytest.mark.parametrize("max_tokens", [400, CONTEXT - 8])
def test_stopping_under_load_ends_every_stream_and_exits_in_order(
    bundle: Path, folder: Callable[[], Path], max_tokens: int
) -> None:
    """vllm#34730: those that can finish do, the others are told, and none is cut off in silence."""
    options = ("--grace", "2" if max_tokens > 1000 else "60", "--max-slots", "8")
    with Served(bundle, folder(), *options) as served:
        ends = asyncio.run(
            ends_of(served, 16, max_tokens, lambda: served.process.send_signal(signal.SIGTERM))
        )
        assert served.process.wait(30) == 0
        if max_tokens == 400:
            # Waiting ones too: they were there before the signal.
            assert set(ends) == {"length"}
        else:
            assert len(ends) == 32
            told = ("the engine was closed", "shutting down", "status 503")
            assert all(any(text in end for text in told) for end in ends), ends


def test_second_signal_under_load_exits_now(bundle: Path, folder: Callable[[], Path]) -> None:
    """Who asks twice does not want to wait for anybody's answer."""
    with Served(bundle, folder(), "--grace", "3600", "--max-slots", "8") as served:

        def twice() -> None:
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "a second signal ends now" in served.said, "the first is noticed")
            served.process.send_signal(signal.SIGINT)

        ends = asyncio.run(ends_of(served, 8, CONTEXT - 8, twice))
        assert served.process.wait(30) == 128 + signal.SIGINT
        assert "length" not in ends


# ── The bundle's folder ────────────────────────────────────────────────────────────────────────


def files_of(bundle: Path) -> set[str]:
    return {path.relative_to(bundle).as_posix() for path in bundle.rglob("*")}


def test_packed_cache_that_cannot_be_written_is_done_without(
    bundle: Path, tmp_path: Path, folder: Callable[[], Path], question: Question
) -> None:
    """A file that may not grow, as with a quota: one sentence, the same answers, no half of it."""
    copy = tmp_path / "tiny"
    shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns(PACKED_NAME))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # noqa: E731
    with Served(copy, folder(), env=cache, preexec_fn=small) as served:
        ask_both(served, question)
        assert served.said.count(NOT_PACKED) == 1
        assert served.stop() == 0
    assert not [path for path in files_of(copy) if "packed" in path and "/" in path]
    assert not list((tmp_path / "cache").rglob("*.building-*"))
    with Served(copy, folder(), env=cache) as served:
        ask_both(served, question)
        assert "WARNING" not in served.said
    assert [path for path in files_of(copy) if path.endswith("sizes.json")]


@contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[None]:
    """A file system of its own at a folder, which only root can have."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_full_disk_is_done_without(
    bundle: Path, tmp_path: Path, folder: Callable[[], Path], question: Question
) -> None:
    """The same where the disk itself is full, which is found in the midst of writing."""
    disk = tmp_path / "disk"
    size = sum(path.stat().st_size for path in bundle.iterdir() if path.is_file())
    with small_disk(disk, size + 200_000):
        copy = disk / "tiny"
        shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns(PACKED_NAME))
        with Served(copy, folder(), "--cache-dir", str(disk / "cache")) as served:
            ask_both(served, question)
            assert served.said.count(NOT_PACKED) == 1
            assert served.stop() == 0
        assert not list(disk.rglob("*.building-*"))


def test_two_servers_may_start_on_one_bundle_at_once(
    bundle: Path, tmp_path: Path, folder: Callable[[], Path], question: Question
) -> None:
    """A rolling update does so: both build what is missing, one of them wins, both are right."""
    copy = tmp_path / "tiny"
    shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns(PACKED_NAME))
    with ExitStack() as stack:
        servers = [stack.enter_context(Served(copy, folder(), wait=False)) for _ in range(2)]
        for served in servers:
            served.wait_ready()
        for served in servers:
            ask_both(served, question)
            assert served.stop() == 0
            assert "WARNING" not in served.said
    assert not list(copy.rglob("*.building-*"))
    assert len(list((copy / PACKED_NAME).iterdir())) == 1


def test_read_only_bundle_is_served_and_left_alone(
    bundle: Path, tmp_path: Path, folder: Callable[[], Path], question: Question
) -> None:
    """Images and volumes are mounted so; the cache is then kept elsewhere."""
    copy, cache = tmp_path / "disk" / "tiny", tmp_path / "cache"
    with ExitStack() as stack:
        if os.geteuid() == 0:  # whom modes do not stop
            stack.enter_context(small_disk(copy.parent, 64 << 20))
        shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns(PACKED_NAME))
        if os.geteuid() == 0:
            subprocess.run(["mount", "-o", "remount,ro", str(copy.parent)], check=True)
        else:
            stack.callback(copy.chmod, 0o755)
            copy.chmod(0o555)
        before = files_of(copy)
        with Served(copy, folder(), env={"XDG_CACHE_HOME": str(cache)}) as served:
            ask_both(served, question)
            assert served.stop() == 0
            assert "WARNING" not in served.said
        assert files_of(copy) == before
    assert len(list(cache.rglob("sizes.json"))) == 1


# ── Descriptors ────────────────────────────────────────────────────────────────────────────────


def connections(address: str, count: int) -> list[socket.socket]:
    """So many that ask nothing yet."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    made = []
    for _ in range(count):
        one = socket.create_connection((host, int(port)), timeout=30)
        one.settimeout(30)
        made.append(one)
    return made


def told(connection: socket.socket) -> bytes:
    """What it was told; empty if nothing comes in a time that is long for any machine."""
    connection.settimeout(20)
    try:
        return connection.recv(1000)
    except TimeoutError:
        return b""
    except OSError as error:
        return repr(error).encode()


def test_more_connections_than_descriptors_are_told_so(
    bundle: Path, folder: Callable[[], Path], question: Question
) -> None:
    """512 descriptors, 600 connections to each server: refused ones learn it at once, the others
    are served, and afterwards all is as before.
    """
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))  # noqa: E731
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("too few descriptors for the clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    with ExitStack() as stack, Served(bundle, folder(), preexec_fn=few) as served:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        over_http, over_grpc = connections(served.http, 600), connections(served.grpc, 600)
        for one in (*over_http, *over_grpc):
            stack.callback(one.close)
        fds = Path(f"/proc/{served.process.pid}/fd")
        if fds.exists():
            wait_until(lambda: len(list(fds.iterdir())) < 450, "refused connections are closed")
        answers = [told(one)[:12] for one in over_http[300:]]
        assert answers == [b"HTTP/1.1 503"] * 300
        request = b"GET /health/ready HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
        for one in over_http[:200]:
            one.sendall(request)
        for one in over_http[:200]:
            assert one.recv(100).startswith(b"HTTP/1.1 200")
        for one in (*over_http, *over_grpc):
            one.close()
        if fds.exists():
            wait_until(lambda: len(list(fds.iterdir())) < 60, "connections that ended are closed")
        ask_both(served, question)
        assert served.stop() == 0
