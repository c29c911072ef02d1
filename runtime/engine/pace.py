"""How much of a prompt one step may read, so that running requests keep their pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from ortolan.graphs.manifest import ModelConfig
from ortolan.runtime.params import EngineConfig

_SMOOTHING = 0.25  # weight of the newest measurement
_FIRST_GUESS = 32  # tokens, before anything was measured
# The margin for scatter, in mean deviations: as many as TCP adds to its retransmission timeout
# (RFC 6298), for tails longer than normal. With three, the p99 was 4.2 of 4 plain steps.
_DEVIATIONS = 4.0
_LEAST_MARGIN = 0.6  # of the bound, on the worst of machines
_FIRST_SCATTER = 0.08
_SCATTER_SMOOTHING = 0.1
# Decoding takes longer after a piece of a prompt, which has swept the processor's caches: 1.4
# times after one with 4,000 tokens of past (docs/engine-performance.md). What is told of plain
# steps is not believed beyond this, since none may have been made for long.
_MOST_SLOWDOWN = 1.6

# A step reads at least so many tokens: fewer cost almost as much. But it reads fewer, down to the
# smallest chunk that changes no bits, where that keeps the bound.
LEAST_CHUNK = 8
SMALLEST_CHUNK = 2
# Where the smallest chunk would exceed the bound by as much, there is nothing to keep: after a
# very long past, or where the bound is less than what a plain step takes.
_HOPELESS = 1.25

# What a prefill call costs beside its tokens, measured on calls of 2 to 256 tokens after 0 to
# 3,800 earlier ones (docs/engine-performance.md): reading the weights is worth so many tokens,
_CALL_TOKENS = 3
# and reading the KV of the past is worth as much as attending to it from so many tokens.
_CALL_QUERIES = 9
# Attention computes in float32, the products mostly in 8 bits.
_ATTENTION_COST = 1.35


def attention_share(config: ModelConfig) -> float:
    """Work of attending to one earlier token, as part of the rest of a token's work."""
    heads = config.num_heads * config.head_dim
    linear = config.hidden_size * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    linear += 3 * config.hidden_size * config.intermediate_size
    return _ATTENTION_COST * 2 * heads / linear


class Pace:
    """Measures steps and prefill calls; tells how many prompt tokens fit in what is left.

    A plain step is one that only decodes, at the same number of rows. Decoding beside a
    prompt is slower, and is measured apart. With running requests, a
    step may take `gap_steps` plain steps, or `gap_ms`, whichever is less; without, a whole chunk.
    What is aimed at stays below by as much as measurements have been off what was expected.
    """

    def __init__(self, config: EngineConfig, share: float) -> None:
        self._gap_steps = config.gap_steps
        self._gap_s = None if config.gap_ms is None else config.gap_ms / 1000
        self._share = share
        # Rows -> seconds of plain steps, and of a unit of prefill work at that time.
        self._plain_s: dict[int, tuple[float, float | None]] = {}
        self._beside_s: dict[int, float] = {}  # rows -> seconds of decoding beside a prompt
        self._unit_s: float | None = None  # seconds per unit of work, see _work
        self._scatter = _FIRST_SCATTER  # mean deviation from what was expected, as part of it

    def plain_step_s(self, rows: int) -> float | None:
        """Seconds that a step with so many rows takes; None before anything was measured.

        Where plain steps are long past, they have changed as the machine has: as much as a unit
        of prefill work has since.
        """
        plain, beside = _nearest(self._plain_s, rows), self._beside_s.get(rows)
        if beside is not None and rows not in self._plain_s:
            return beside
        if plain is None:
            return _nearest(self._beside_s, rows)
        seconds, unit_s = plain
        if unit_s is not None and self._unit_s is not None:
            seconds *= self._unit_s / unit_s
        return seconds if beside is None else min(max(seconds, beside / _MOST_SLOWDOWN), beside)

    def decoded(self, rows: int, seconds: float, *, beside_prompt: bool = False) -> None:
        """A step decoded and sampled so many rows, after it had read a piece of a prompt or not."""
        if beside_prompt:
            known = self._beside_s.get(rows)
            self._beside_s[rows] = seconds if known is None else _smooth(known, seconds)
        else:
            known, _ = self._plain_s.get(rows, (None, None))
            smooth = seconds if known is None else _smooth(known, seconds)
            self._plain_s[rows] = smooth, self._unit_s
        if known is not None:
            self._note_deviation(seconds / known)

    def prefilled(self, sizes: Sequence[int], starts: Sequence[int], seconds: float) -> None:
        """A call read `sizes` prompt tokens, one row each, after `starts` earlier ones."""
        rows = zip(sizes, starts, strict=True)
        unit_s = seconds / (_CALL_TOKENS + sum(self._work(*row) for row in rows))
        if self._unit_s is None:
            self._unit_s = unit_s
            return
        self._note_deviation(unit_s / self._unit_s)
        self._unit_s = _smooth(self._unit_s, unit_s)

    def bound_s(self, rows: int) -> float | None:
        """Seconds that a step with so many running rows may take; None: no bound."""
        plain = self.plain_step_s(rows) if rows else None
        if plain is None:
            return None
        bound = self._gap_steps * plain
        return bound if self._gap_s is None else min(bound, self._gap_s)

    def tokens(self, rows: int, start: int, spent_s: float) -> int | None:
        """Prompt tokens that a step with so many running rows may read; None: no bound.

        start: earlier tokens of the prompt. spent_s: what the step has taken so far.
        """
        bound = self.bound_s(rows)
        plain = self.plain_step_s(rows)
        if bound is None or plain is None:
            return None
        if self._unit_s is None:
            return _FIRST_GUESS
        margin = max(1 / (1 + _DEVIATIONS * self._scatter), _LEAST_MARGIN)
        decode_s = self._beside_s.get(rows, plain)
        tokens = self._tokens_in(bound * margin - decode_s - spent_s, start)
        if tokens >= LEAST_CHUNK:
            return tokens
        smallest_s = self._unit_s * (_CALL_TOKENS + self._work(SMALLEST_CHUNK, start))
        if decode_s + smallest_s > _HOPELESS * bound:
            return LEAST_CHUNK
        return max(tokens, SMALLEST_CHUNK)

    def _tokens_in(self, seconds: float, start: int) -> int:
        """The most tokens whose work takes so many seconds; negative if none does."""
        assert self._unit_s is not None
        work = seconds / self._unit_s - _CALL_TOKENS
        tokens = 0.0
        for _ in range(2):  # the past includes half the chunk itself: short beside what is before
            attended = self._share * (start + max(tokens, 0.0) / 2)
            tokens = (work - _CALL_QUERIES * attended) / (1 + attended)
        return int(tokens)

    def _work(self, tokens: int, start: int) -> float:
        """Of a row in a call, in tokens without attention."""
        return tokens + self._share * (tokens + _CALL_QUERIES) * (start + tokens / 2)

    def _note_deviation(self, ratio: float) -> None:
        off = min(abs(ratio - 1), 1.0)  # a single stall must not count for many steps
        self._scatter += _SCATTER_SMOOTHING * (off - self._scatter)


_T = TypeVar("_T")


def _nearest(known: Mapping[int, _T], rows: int) -> _T | None:
    """What is known of so many rows, or of the nearest number of them."""
    return known[min(known, key=lambda other: abs(other - rows))] if known else None


def _smooth(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old)
