"""What every provider is asked, and how its answers are written down.

make_provider_references.py asks the CPU in the environment that exports; tests/providers ask the
provider in its own, where nothing can be exported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.runtime.engine.device_logits import on_host
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import SamplingParams

FloatArray = npt.NDArray[np.float32]

SLOTS = 4
CONTEXT = 48
# Exact: float32 activations everywhere, so that providers differ by the order of sums alone.
SETTINGS: Mapping[str, Any] = {
    "accuracy": "exact",
    "max_slots": SLOTS,
    "max_context": CONTEXT,
    "prefill_chunk": 16,
    "prefix_cache_mb": 0,
}
RAGGED = [[5, 6, 7, 8, 9], [20, 21, 22], [30], list(range(40, 57)), [60, 61], [70] * 20]
EQUAL = [[5 + row, 90, 17 * row + 3, 200, 41, 6] for row in range(SLOTS)]


@dataclass(frozen=True)
class Scenario:
    """Prompts that are asked together, with these settings of the engine beside SETTINGS."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    settings: Mapping[str, Any] = field(default_factory=dict)


def _greedy(tokens: int = 8, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=1, **others)


def _sampled(**others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0, **others)


SCENARIOS: Mapping[str, Scenario] = {
    "single": Scenario(RAGGED[:1], _greedy(12)),
    "batched": Scenario(EQUAL, _greedy()),
    "ragged": Scenario(RAGGED, _greedy()),  # more than there are slots
    "forks": Scenario(RAGGED[:2], _sampled(n=3, seed=3, temperature=0.9)),
    # Growth is expected, but not so much of it.
    "preempted": Scenario(RAGGED[:4], _greedy(24), {"kv_tokens": 56}),
    "chunked": Scenario([list(range(100, 130)), [9, 8, 7]], _greedy(4), {"prefill_chunk": 4}),
    "penalties": Scenario(
        RAGGED[:3],
        _sampled(
            seed=11,
            temperature=0.8,
            top_p=0.95,
            top_k=40,
            min_p=0.01,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={7: 2.0},
        ),
    ),
    "prompt scores": Scenario(RAGGED[3:4], _greedy(2, prompt_logprobs=2)),
}

Answer = dict[str, Any]


def ask(llm: LLM, scenario: Scenario) -> list[Answer]:
    """The answers as JSON has them, one for each choice.

    logprobs: of the chosen tokens. gaps: how far the best token is ahead of the next, where greedy.
    """
    found: list[Answer] = []
    for result in llm.generate(scenario.prompts, scenario.params):
        logprobs = result.logprobs or ()
        answer: Answer = {
            "token_ids": list(result.token_ids),
            "finish_reason": result.finish_reason,
            "logprobs": [position.chosen.logprob for position in logprobs],
        }
        if result.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [
                None if position is None else [position.chosen.logprob, *_tops(position.top)]
                for position in result.prompt_logprobs
            ]
        found.append(answer)
    return found


def _tops(top: Sequence[Any]) -> list[float]:
    return [token.logprob for token in top]


def logits_of(llm: LLM) -> dict[str, FloatArray]:
    """Whole rows of logits by what made them: a prompt in pieces, then decode of unequal rows.

    prefill [2, vocab]: after both pieces of a prompt. decode [steps * rows, vocab].
    """
    model = llm._running()._model
    vocab = model.config.vocab_size
    first, second = model.prefill(0, [[5, 6, 7, 8, 9, 10, 11]], [0], [[6]]), None
    rows = [on_host(first)[0, 0].copy()]
    second = model.prefill(0, [[12, 13, 14, 15, 16, 17]], [7], [[5]])
    rows.append(on_host(second)[0, 0].copy())
    lengths = [13, 3, 5]
    for slot in (1, 2):
        ids = [(31 * slot + 3 * place) % vocab for place in range(lengths[slot])]
        model.prefill(slot, [ids], [0], [[len(ids) - 1]])
    steps = []
    for step in range(6):
        ids = [(40 + 50 * row + step) % vocab for row in range(3)]
        steps.append(on_host(model.decode(0, ids, lengths)).copy())
        lengths = [length + 1 for length in lengths]
    return {"prefill": np.stack(rows), "decode": np.concatenate(steps)}
