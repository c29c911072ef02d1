"""Thousands of mixed requests on a tiny model: nothing is left of them, and memory stays flat."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from ortolan.errors import CancelledError, OverloadedError, TimedOutError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine import residents
from ortolan.runtime.engine.async_engine import AsyncEngine
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.opening import open_engine
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

REQUESTS = 5_000
WARM_UP = 1_500
AT_ONCE = 48
CONTEXT = 64  # of the tiny model
# What allocators and interpreters may keep. A leak of a KB per request would show as 3.5 MB, of a
# slot's or a block's KV (8 KB and more) as 28 MB; see the test's second assertion for the former.
RESIDENT_MARGIN_BYTES = 12 * 2**20
OBJECTS_MARGIN = 1_000  # over 3,500 requests

# The same request again and again: its answer must never change.
CANARY = Request(
    [3 + i % 50 for i in range(30)], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
)


def held(engine: Engine) -> tuple[int, int]:
    """Resident bytes and live objects, of an engine with nothing to do."""
    engine._scheduler.expire(math.inf)  # deadlines of those that have ended are held in part
    engine.forget_prefixes()
    gc.collect()
    return resident_bytes(), len(gc.get_objects())


def resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        pytest.skip("no /proc here to measure with")
    return pages * 4096


def random_request(rng: random.Random) -> Request:
    """Short and long, alone and several, greedy and not; half begin like others do."""
    stem = rng.randrange(6)
    shared = rng.choice([0, 0, 20, 33, 48])
    prompt = [3 + (7 * i + stem) % 200 for i in range(shared)]
    prompt += [rng.randrange(3, 290) for _ in range(rng.randint(1, CONTEXT - 6 - shared))]
    params = SamplingParams(
        max_tokens=rng.choice([0, 1, 3, 8, 40]),
        temperature=rng.choice([0.0, 0.8]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.randrange(100),
        n=rng.choice([1, 1, 1, 1, 3]),
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None] * 7 + [1]),
        ignore_eos=rng.random() < 0.7,
        stop=rng.choice([(), (), ("th",)]),
    )
    return Request(
        prompt,
        params,
        priority=rng.choice([-1, 0, 0, 0, 5]),
        timeout_s=rng.choice([None] * 6 + [3600.0, 0.005]),
        salt=rng.choice(["", "", "other"]),
    )


async def one(front: AsyncEngine, rng: random.Random, ends: Counter[str]) -> None:
    """A client: reads all, leaves early, or is a canary."""
    kind = rng.random()
    asked = CANARY if kind < 0.02 else random_request(rng)
    leaves_after = rng.randrange(4) if kind > 0.85 else None
    while True:
        try:
            stream = await front.submit(asked)
            break
        except OverloadedError:
            ends["refused"] += 1
            await asyncio.sleep(0.02)
    if leaves_after == 0:
        stream.cancel()
    token_ids: list[int] = []
    try:
        async for event in stream:
            token_ids += event.token_ids
            if leaves_after is not None:
                leaves_after -= 1
                if leaves_after <= 0:
                    stream.cancel()
    except (CancelledError, TimedOutError) as error:
        ends[type(error).__name__] += 1
        return
    ends["finished"] += 1
    if asked is CANARY:
        ends[f"canary {token_ids}"] += 1


async def many(front: AsyncEngine, count: int, rng: random.Random, ends: Counter[str]) -> None:
    """So many requests, of which AT_ONCE are under way; each has a random source of its own."""
    seeds = [rng.randrange(2**32) for _ in range(count)]

    async def client() -> None:
        while seeds:
            await one(front, random.Random(seeds.pop()), ends)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


async def soak(engine: Engine, ends: Counter[str]) -> tuple[int, int, int]:
    """How much more memory, and how many more objects, there are after it than after a part; and
    how many requests it made.

    An allocator may take a large piece once, where other tests of the process have left it full of
    holes. So where memory has grown, it is done again: what leaks grows again.
    """
    rng, front = random.Random(5), AsyncEngine(engine)
    await many(front, WARM_UP, rng, ends)
    made = WARM_UP
    for _ in range(2):
        before = held(engine)
        await many(front, REQUESTS - WARM_UP, rng, ends)
        after = held(engine)
        made += REQUESTS - WARM_UP
        if after[0] - before[0] < RESIDENT_MARGIN_BYTES:
            break
    await front.close()
    return after[0] - before[0], after[1] - before[1], made


def assert_nothing_left(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.broken is None
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)
    scheduler = engine._scheduler
    scheduler.verify()
    assert len(scheduler.queue) == scheduler.queue.tokens == len(scheduler.residents) == 0
    assert scheduler.prefix is not None
    assert stats.prefix_blocks == 0  # after `held` has asked to forget them
    assert not scheduler.prefix._roots
    scheduler.verify()


def test_five_thousand_requests_leave_nothing(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server runs for months: slots, budget, prefix tree and memory must come back."""
    # Answers are so short here that the usual headroom would leave little to preempt.
    monkeypatch.setattr(residents, "_HEADROOM_TOKENS", 2)
    config = EngineConfig(
        max_slots=8,
        prefill_chunk=32,
        kv_tokens=200,  # tight: eight of 64 tokens would be 512
        prefix_cache_mb=1,
        max_waiting=40,  # fewer than there are clients beside the running ones
        priority_patience=4,
    )
    engine = open_engine(Bundle.open(tiny_bundle), config, Tokenizer.open(tiny_bundle))
    ends: Counter[str] = Counter()
    more_bytes, more_objects, made = asyncio.run(soak(engine, ends))
    assert_nothing_left(engine)
    stats = engine.stats()
    # It was what it says: all of this happened.
    assert ends["finished"] + ends["CancelledError"] + ends["TimedOutError"] == made
    assert min(ends["finished"], ends["CancelledError"], ends["TimedOutError"]) > 50
    assert stats.preemptions > 50
    assert stats.prefix_hit_tokens > 5_000
    assert len([kind for kind in ends if kind.startswith("canary")]) == 1
    assert more_bytes < RESIDENT_MARGIN_BYTES
    assert more_objects < OBJECTS_MARGIN
