"""What the engine needs of a model and a sampler; tests put ones in that a hand can compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ortolan.errors import EngineError
from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.engine.device_logits import Logits
from ortolan.runtime.engine.sampler import Sampled
from ortolan.runtime.engine.sampler_row import SamplerRow


class KvSeam(Protocol):
    """Slots that hold the keys and values of so many tokens each; see engine/kv_cache.py."""

    slots: int
    capacity: int

    def copy(self, source: int, target: int, tokens: int) -> None: ...

    def discard(self, slot: int, tokens: int, start: int = 0) -> None: ...


class ModelSeam(Protocol):
    """The decoder over slots of a KV cache; see engine/model.py for what the calls mean.

    row_multiple: what the rows of a decode call have to be a multiple of. ragged: whether prefill
    takes several rows.
    Calls raise EngineError, and may be repeated after that.
    """

    config: ModelConfig
    row_multiple: int

    @property
    def cache(self) -> KvSeam: ...

    @property
    def ragged(self) -> bool: ...

    def decode(self, first: int, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits: ...

    def prefill(
        self,
        first: int,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_index: Sequence[Sequence[int]],
    ) -> Logits: ...


class SamplerSeam(Protocol):
    """Logits to tokens; see engine/sampler.py."""

    def sample(
        self, logits: Logits, rows: Sequence[SamplerRow]
    ) -> Sequence[Sampled | EngineError]: ...

    def finite(self, logits: Logits) -> bool: ...

    def score(self, logits: Logits, token_ids: Sequence[int], count: int) -> Sequence[Sampled]: ...
