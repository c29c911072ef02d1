"""Requests for an engine on a mock model, and what becomes of them."""

from __future__ import annotations

from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.life import RequestHandle, State
from ortolan.runtime.params import Request, SamplingParams


def request(prompt: int | list[int], max_tokens: int = 8, **settings: object) -> Request:
    """A greedy request that runs to its limit; `prompt` may be a length."""
    ids = [5 + i % 40 for i in range(prompt)] if isinstance(prompt, int) else prompt
    names = ("n", "logprobs", "prompt_logprobs", "logit_bias")
    own = {name: settings.pop(name) for name in names if name in settings}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **own)  # type: ignore[arg-type]
    return Request(ids, params, **settings)  # type: ignore[arg-type]


def drain(engine: Engine) -> None:
    """Steps until nothing is left to do, which must leave nothing behind."""
    for _ in range(2000):
        if not engine.step():
            assert_empty(engine)
            return
    raise AssertionError("the engine does not come to an end")


def tokens(handle: RequestHandle, choice: int = 0) -> list[int]:
    return [i for e in handle.events if e.choice == choice for i in e.token_ids]


def states(*handles: RequestHandle) -> list[State]:
    return [handle.choices[0].state for handle in handles]


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)
