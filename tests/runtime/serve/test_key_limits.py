"""What a key is good for: its tenant's cached prompts, its minute, as long as it is in the file."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from grpc_serving import NO_RETRY, PROMPT, MockService, in_loop, serving
from http_live import live
from keyed import ADA, ALICE, BOB, KEYS, bearer, secured
from mock_engine import Clock
from scripted_service import ScriptedService

from ortolan.client.aio import AsyncClient
from ortolan.client.calls import RetryPolicy
from ortolan.errors import AuthenticationError, OverloadedError, RateLimitError
from ortolan.runtime.params import Request, SamplingParams, TokenEvent, Usage
from ortolan.runtime.serve.callers import CALLER, Keys
from ortolan.runtime.serve.security import (
    Security,
    reload_on_hangup,
)

# Tenants.


@in_loop
async def test_tenants_share_no_cached_prompts_whatever_their_salts(keys_file: Path) -> None:
    """vllm#16016: who sees that a prompt was cached knows that somebody else has sent it."""
    service = MockService(prefix_blocks=32)
    prompt = list(range(5, 45))

    async def cached(key: str, salt: str = "") -> int:
        async with AsyncClient(address, api_key=key, retry=NO_RETRY) as client:
            settings = {"max_tokens": 1, "temperature": 0.0, "cache_salt": salt or None}
            (answer,) = await client.generate(prompt, **settings)  # type: ignore[arg-type]
            return answer.usage.cached_tokens

    async with serving(service, secured(keys_file)) as address:
        assert await cached(ALICE) == 0
        assert await cached(ALICE) > 0
        assert await cached(ADA) > 0, "of the same tenant"
        assert await cached(BOB) == 0
        # Neither another tenant's salt, nor anything that looks like one of ours, gets in.
        assert await cached(ALICE, "secret") == 0
        assert await cached(ADA, "secret") > 0
        for guess in ("secret", "acme", "acme\0", "acme\0secret"):
            assert await cached(BOB, guess) == 0, guess
        assert await cached(BOB) > 0, "his own"


# Limits.


def limited(tmp_path: Path, limits: str) -> tuple[Security, Clock, Path]:
    file, clock = tmp_path / "limited.toml", Clock()
    file.write_text(f'[alice]\nkey = "{ALICE}"\n{limits}\n[bob]\nkey = "{BOB}"\n')
    return Security(keys=Keys(file, clock)), clock, file


def test_http_requests_past_the_limit_are_told_when_to_come_back(tmp_path: Path) -> None:
    """OpenAI's client waits for Retry-After by itself; other keys notice nothing."""
    security, clock, _ = limited(tmp_path, "requests_per_minute = 3")
    with live(ScriptedService(lambda request: ()), security=security) as server:
        for _ in range(3):
            assert server.call("GET", "/v1/models", headers=bearer(ALICE)).status == 200
        refused = server.call("GET", "/v1/models", headers=bearer(ALICE))
        assert refused.status == 429
        assert refused.headers["retry-after"] == "20"
        assert refused.error["type"] == "rate_limit_error"
        assert refused.error["code"] == "rate_limit_exceeded"
        assert "its 3 requests per minute" in refused.error["message"]
        assert server.call("GET", "/v1/models", headers=bearer(BOB)).status == 200
        clock.now += 20
        assert server.call("GET", "/v1/models", headers=bearer(ALICE)).status == 200
        assert server.call("GET", "/v1/models", headers=bearer(ALICE)).status == 429


def test_openai_client_knows_both_refusals(tmp_path: Path) -> None:
    """Programs catch its classes, which it chooses by our status and shape."""
    openai = pytest.importorskip("openai")
    security, _, _ = limited(tmp_path, "requests_per_minute = 1")
    with live(ScriptedService(lambda request: ()), security=security) as server:
        settings = {"base_url": f"{server.url}/v1", "max_retries": 0}
        with openai.OpenAI(api_key="none", **settings) as stranger:
            with pytest.raises(openai.AuthenticationError, match="not known here") as caught:
                stranger.models.list()
            assert caught.value.code == "invalid_api_key"
        with openai.OpenAI(api_key=ALICE, **settings) as client:
            assert client.models.list().data[0].id == "scripted"
            with pytest.raises(openai.RateLimitError, match="1 requests per minute"):
                client.models.list()


def test_every_prompt_of_a_batch_is_a_request(tmp_path: Path) -> None:
    """Otherwise 128 prompts in one body would count as one."""
    event = TokenEvent("x", (5,), "stop", Usage(1, 1))
    security, _, _ = limited(tmp_path, "requests_per_minute = 3")

    class Service(ScriptedService):
        async def submit(self, request: Request) -> Any:
            caller = CALLER.get()
            assert caller is not None
            return await caller.submit(request, super().submit)

    with live(Service(lambda request: [event]), security=security) as server:
        three = {"prompt": ["a", "b", "c"], "max_tokens": 1}
        assert server.call("POST", "/v1/completions", three, bearer(ALICE)).status == 200
        assert server.call("POST", "/v1/completions", three, bearer(ALICE)).status == 429
        security, _, _ = limited(tmp_path, "requests_per_minute = 2")
    with live(service := Service(lambda request: [event]), security=security) as server:
        assert server.call("POST", "/v1/completions", three, bearer(ALICE)).status == 429
        assert not service.streams, "a batch is refused as a whole"


@in_loop
async def test_grpc_calls_past_the_limit_have_a_hint(tmp_path: Path) -> None:
    """`ortolan.Client` waits for it by itself."""
    security, clock, _ = limited(tmp_path, "requests_per_minute = 2")
    async with serving(MockService(), security) as address:
        async with AsyncClient(address, api_key=ALICE, retry=NO_RETRY) as client:
            for _ in range(2):
                assert await client.generate(PROMPT, max_tokens=1)
            with pytest.raises(RateLimitError, match="2 requests per minute") as caught:
                await client.generate(PROMPT, max_tokens=1)
            assert caught.value.retry_after_s == 30
            assert isinstance(caught.value, OverloadedError)
            clock.now += 29.95
        patient = RetryPolicy(max_retries=1)
        async with AsyncClient(address, api_key=ALICE, retry=patient) as client:
            asked = asyncio.ensure_future(client.generate(PROMPT, max_tokens=1))
            await asyncio.sleep(0.02)
            clock.now += 0.05
            assert await asked


@in_loop
async def test_tokens_of_prompts_and_answers_count(tmp_path: Path) -> None:
    """Ten long answers are not ten short ones; a key that has had its tokens waits for new ones."""
    security, clock, _ = limited(tmp_path, "tokens_per_minute = 60")
    async with (
        serving(MockService(), security) as address,
        AsyncClient(address, api_key=ALICE, retry=NO_RETRY) as client,
    ):
        settings: Any = {"max_tokens": 28, "temperature": 0, "ignore_eos": True}
        for _ in range(2):  # 4 + 28 tokens each, which goes 4 below nothing
            assert await client.generate(PROMPT, **settings)
        with pytest.raises(RateLimitError, match="60 tokens per minute") as caught:
            await client.generate(PROMPT, **settings)
        assert caught.value.retry_after_s == pytest.approx(5)
        assert (await client.stats()).running == 0, "what makes no tokens is not held up"
        clock.now += 5
        assert await client.generate(PROMPT, **settings)


@in_loop
async def test_request_that_the_engine_refuses_costs_no_tokens(tmp_path: Path) -> None:
    """A prompt that is too long was never read."""
    security, _, _ = limited(tmp_path, "tokens_per_minute = 60")
    async with (
        serving(MockService(), security) as address,
        AsyncClient(address, api_key=ALICE, retry=NO_RETRY) as client,
    ):
        for _ in range(3):
            with pytest.raises(Exception, match="prompt"):
                await client.generate([5] * 500)
        assert await client.generate(PROMPT, max_tokens=1)


# The file, read again.


def test_hangup_reads_the_keys_again_and_keeps_them_if_they_cannot_be_read(
    keys_file: Path,
) -> None:
    """A key that leaked is withdrawn without a restart; a typing error locks nobody out."""
    security, said = secured(keys_file), list[str]()

    async def run() -> None:
        stop = reload_on_hangup(security, said.append)
        try:
            for text, expected in ((f'[bob]\nkey = "{BOB}"', 1), ("[bob", 2), (KEYS, 3)):
                keys_file.write_text(text)
                os.kill(os.getpid(), signal.SIGHUP)
                while len(said) < expected:
                    await asyncio.sleep(0.002)
        finally:
            stop()

    before = signal.getsignal(signal.SIGHUP)
    asyncio.run(asyncio.wait_for(run(), 30))
    assert said[0] == said[2] == "SIGHUP: the file of keys was read again"
    assert "the file of keys stays as it was: api_keys_file" in said[1]
    assert security.keys is not None
    assert len(security.keys) == 3
    assert signal.getsignal(signal.SIGHUP) == before


@in_loop
async def test_withdrawn_key_begins_nothing_even_in_a_call_that_runs(tmp_path: Path) -> None:
    """One call may ask many times, for days."""
    _, clock, file = limited(tmp_path, "requests_per_minute = 5")
    keys, service = Keys(file, clock), MockService()
    caller = keys.admit([f"Bearer {ALICE}".encode()])
    request = Request(PROMPT, SamplingParams(max_tokens=1))
    stream = await caller.submit(request, service.submit)
    file.write_text(f'[bob]\nkey = "{BOB}"')
    keys.reload()
    assert [event async for event in stream], "what runs ends in its own time"
    with pytest.raises(AuthenticationError):
        await caller.submit(request, service.submit)
    with pytest.raises(AuthenticationError):
        keys.admit([f"Bearer {ALICE}".encode()])
    await service.close()


def test_reading_again_refills_nobodys_minute(tmp_path: Path) -> None:
    """Nor does it lengthen the list of what is counted: an account a key, and no more."""
    security, _, file = limited(tmp_path, "requests_per_minute = 1")
    keys = security.keys
    assert keys is not None
    keys.admit([f"Bearer {ALICE}".encode()])
    for _ in range(3):
        keys.reload()
        with pytest.raises(RateLimitError):
            keys.admit([f"Bearer {ALICE}".encode()])
        assert len(keys) == 2
    file.write_text(file.read_text().replace("= 1", "= 2"))
    keys.reload()
    keys.admit([f"Bearer {ALICE}".encode()])


def test_strangers_leave_nothing_behind(keys_file: Path) -> None:
    """What is counted is bounded by the file, whatever is tried at the door."""
    keys = Keys(keys_file)
    for number in range(1000):
        with pytest.raises(AuthenticationError):
            keys.admit([f"Bearer guess-number-{number}".encode()])
    assert len(keys) == 3
