"""A tiny model with a long context, served; and the official client connected to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")

from http_live import Live, live, wait_until  # noqa: E402  after what they need is known to exist

from ortolan.runtime.bundle import Bundle  # noqa: E402
from ortolan.runtime.params import EngineConfig  # noqa: E402
from ortolan.runtime.serve.service import Service  # noqa: E402

CONTEXT = 2048


@pytest.fixture(scope="session")
def served_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, so answers mean nothing and rarely end by themselves."""
    pytest.importorskip("gguf")
    from tiny_llama import export_long

    return export_long(tmp_path_factory.mktemp("served"), CONTEXT)


@pytest.fixture(scope="session")
def session_server(served_bundle: Path) -> Iterator[Live]:
    config = EngineConfig(max_slots=4, max_waiting=16, prefix_cache_mb=8)
    service = Service(Bundle.open(served_bundle), config, name="tiny")
    with live(service) as server:
        server.run(service.warm_up())
        yield server
        server.run(service.close())


@pytest.fixture
def server(session_server: Live) -> Iterator[Live]:
    """The served model, which every test leaves idle."""
    yield session_server
    wait_until(lambda: is_idle(session_server))


def is_idle(server: Live) -> bool:
    """Whether no request holds anything."""
    stats = server.service.stats()
    return bool((stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0))


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    """The official client, which repeats nothing."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as made:
        yield made
