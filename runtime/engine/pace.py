"""How much of a prompt one step may read, so that running requests keep their pace."""

from __future__ import annotations

from collections.abc import Sequence

from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.params import EngineConfig

_SMOOTHING = 0.25  # weight of the newest measurement
_MARGIN = 0.8  # of the bound: measurements scatter
_FIRST_GUESS = 32  # tokens, before anything was measured


def attention_share(config: ModelConfig) -> float:
    """Work of attending to one earlier token, as part of the rest of a token's work."""
    heads = config.num_heads * config.head_dim
    linear = config.hidden_size * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    linear += 3 * config.hidden_size * config.intermediate_size
    return 2 * heads / linear


class Pace:
    """Measures steps and prefill calls; tells how many prompt tokens fit in what is left.

    A plain step is one that only decodes, at the same number of rows. With running requests, a
    step may take `gap_steps` plain steps, or `gap_ms`, whichever is less; without, a whole chunk.
    """

    def __init__(self, config: EngineConfig, share: float) -> None:
        self._gap_steps = config.gap_steps
        self._gap_s = None if config.gap_ms is None else config.gap_ms / 1000
        self._share = share
        self._plain_s: dict[int, float] = {}  # rows -> seconds
        self._unit_s: float | None = None  # seconds per unit of work, see _work

    def plain_step_s(self, rows: int) -> float | None:
        """Seconds that a step with so many rows takes; None before anything was measured."""
        if rows in self._plain_s or not self._plain_s:
            return self._plain_s.get(rows)
        nearest = min(self._plain_s, key=lambda known: abs(known - rows))
        return self._plain_s[nearest]

    def decoded(self, rows: int, seconds: float) -> None:
        """A step decoded and sampled so many rows."""
        known = self._plain_s.get(rows)
        self._plain_s[rows] = seconds if known is None else _smooth(known, seconds)

    def prefilled(self, sizes: Sequence[int], starts: Sequence[int], seconds: float) -> None:
        """A call read `sizes` prompt tokens, one row each, after `starts` earlier ones."""
        work = sum(self._work(*row) for row in zip(sizes, starts, strict=True))
        unit_s = seconds / work
        self._unit_s = unit_s if self._unit_s is None else _smooth(self._unit_s, unit_s)

    def budget_s(self, rows: int) -> float | None:
        """Seconds that a step with so many running rows has for prompts; None: no bound."""
        plain = self.plain_step_s(rows) if rows else None
        if plain is None:
            return None
        budget = self._gap_steps * plain
        if self._gap_s is not None:
            budget = min(budget, self._gap_s)
        return max(budget * _MARGIN - plain, 0.0)

    def tokens(self, seconds: float, start: int) -> int:
        """Prompt tokens that can be read in `seconds` after `start` earlier ones."""
        if self._unit_s is None:
            return _FIRST_GUESS
        work = seconds / self._unit_s
        # Work grows with the square of a chunk, but chunks are short beside their past.
        tokens = work / (1 + self._share * start)
        return int(work / (1 + self._share * (start + tokens / 2)))

    def _work(self, tokens: int, start: int) -> float:
        return tokens * (1 + self._share * (start + tokens / 2))


def _smooth(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old)
