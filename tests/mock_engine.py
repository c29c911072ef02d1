"""A model and a sampler that a hand can compute, and a clock that they move.

What the mock model stores as KV is the token, its position, and how it was written: by prefill in
company, by prefill alone, or by decode. Its logits are a function of all that a slot holds. So an
answer changes as soon as KV is lost, mixed up, or reused against the rules (a), (b), (c).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ortolan.errors import EngineError
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.kv_cache import KvCache
from ortolan.runtime.engine.prefix_cache import PrefixCache
from ortolan.runtime.engine.sampler import Sampled, not_finite
from ortolan.runtime.engine.sampler_row import SamplerRow
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.text.no_tokenizer import NoTokenizer

VOCAB = 50
END, RAISES, NAN = 1, 2, 3  # ids that end an answer, make a call fail, make logits NaN
CONTEXT = 96

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_context=CONTEXT,
    tie_embeddings=True,
)

_PREFILLED, _PREFILLED_ALONE, _DECODED = 1, 2, 3


@dataclass
class Clock:
    """Seconds, moved by the model."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MockModel:
    """See the module. plain_s: seconds of a decode step; token_s: of a prompt token."""

    clock: Clock
    slots: int
    row_multiple: int = 1
    ragged: bool = True
    config: ModelConfig = CONFIG
    plain_s: float = 0.010
    token_s: float = 0.001
    broken: bool = False
    largest_call: int = 0
    prefill_rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = KvCache(CONFIG, self.slots + self.slots % self.row_multiple, CONTEXT)

    def decode(self, first: int, token_ids: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
        assert len(token_ids) % self.row_multiple == 0
        self.clock.now += self.plain_s
        self._may_fail(token_ids)
        rows = []
        for row, (token_id, length) in enumerate(zip(token_ids, lengths, strict=True)):
            self._write(first + row, length, [token_id], _DECODED)
            rows.append(self._logits(first + row, length + 1))
        return np.stack(rows)

    def prefill(
        self,
        first: int,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_index: Sequence[Sequence[int]],
    ) -> np.ndarray:
        assert self.ragged or len(token_ids) == 1
        self.prefill_rows.append(len(token_ids))
        self.largest_call = max(self.largest_call, sum(map(len, token_ids)))
        self.clock.now += self.token_s * sum(map(len, token_ids))
        self._may_fail([token_id for ids in token_ids for token_id in ids])
        result = []
        for row, (ids, length) in enumerate(zip(token_ids, lengths, strict=True)):
            how = _PREFILLED if len(ids) % 32 != 1 else _PREFILLED_ALONE
            self._write(first + row, length, ids, how)
            index = logits_index[row]
            result.append([self._logits(first + row, length + place + 1) for place in index])
        return np.array(result, np.float32)

    def _may_fail(self, token_ids: Sequence[int]) -> None:
        if self.broken or RAISES in token_ids:
            raise EngineError("the mock session broke")

    def _write(self, slot: int, start: int, ids: Sequence[int], how: int) -> None:
        for position, token_id in enumerate(ids, start):
            self.cache.array[:, slot, 0, position] = token_id, how * 1000 + position

    def _logits(self, slot: int, length: int) -> np.ndarray:
        held = self.cache.array[:, slot, 0, :length]
        if (held[0, :, 0] == NAN).any():
            return np.full(VOCAB, np.nan, np.float32)
        digest = hashlib.blake2b(held.tobytes(), digest_size=8).digest()
        logits = np.random.default_rng(int.from_bytes(digest)).normal(size=VOCAB)
        logits[[RAISES, NAN]] = -50.0
        return logits.astype(np.float32)


class MockSampler:
    """Softmax at temperature 1, or the largest; adjustments by the row itself."""

    def sample(self, logits: np.ndarray, rows: Sequence[SamplerRow]) -> list[Sampled | EngineError]:
        return [self._one(logits[index].copy(), row) for index, row in enumerate(rows)]

    def finite(self, logits: np.ndarray) -> bool:
        return bool(np.isfinite(logits).all())

    def score(self, logits: np.ndarray, token_ids: Sequence[int], count: int) -> list[Sampled]:
        if not np.isfinite(logits).all():
            raise not_finite()
        return [
            Sampled(token_id, float(log_softmax(logits[place])[token_id]))
            for place, token_id in enumerate(token_ids)
        ]

    def _one(self, logits: np.ndarray, row: SamplerRow) -> Sampled | EngineError:
        if not math.isfinite(float(logits.max())):
            return not_finite()
        own = log_softmax(logits)
        row.apply(logits)
        if row.greedy:
            token_id = int(logits.argmax())
        else:
            cumulative = np.exp(log_softmax(logits)).cumsum()
            token_id = int(cumulative.searchsorted(row.uniform() * cumulative[-1], side="right"))
        return Sampled(token_id, float(own[token_id]))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def mock_engine(
    *,
    slots: int = 4,
    kv_budget: int = 4 * CONTEXT,
    prefix_blocks: int = 0,
    row_multiple: int = 1,
    ragged: bool = True,
    **settings: object,
) -> tuple[Engine, MockModel]:
    """An engine on mocks, which checks its invariants after every step."""
    clock = Clock()
    model = MockModel(clock, slots, row_multiple=row_multiple, ragged=ragged)
    block_bytes = 16 * CONFIG.head_dim * 2 * 4
    engine = Engine(
        model,
        MockSampler(),
        NoTokenizer({"eos_token_id": END}),
        EngineConfig(max_slots=slots, **settings),  # type: ignore[arg-type]
        max_context=CONTEXT,
        kv_budget=kv_budget,
        prefix=PrefixCache(model.cache, prefix_blocks * block_bytes) if prefix_blocks else None,
        clock=clock,
        checks=True,
    )
    return engine, model
