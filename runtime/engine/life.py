"""The life of a request: its states, what each holds, and which may follow which.

waiting ────► prefilling ────► decoding ────► finished
   │ ▲            │ │             │ │
   │ └─ preempted ◄─┴─────────────┘ │      from anywhere before the end:
   └──────────────────────────────► decoding (a choice that copies its sibling's KV)
                                           cancelled, timed out, failed

state               holds
waiting, preempted  a place in the queue, or, for a choice above the first, in its request
prefilling          a slot, KV tokens of the budget, references into the prefix cache
decoding            a slot, KV tokens of the budget
the others          nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count

from ortolan.errors import OrtolanError
from ortolan.runtime.engine.prefix_cache import Path
from ortolan.runtime.engine.sampler_row import SamplerRow
from ortolan.runtime.params import PositionLogprobs, Request, TokenEvent
from ortolan.runtime.text.answer import AnswerText


class State(Enum):
    """Where a choice is in its life; the module's docstring draws the way."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    FAILED = "failed"


QUEUED = frozenset({State.WAITING, State.PREEMPTED})
RESIDENT = frozenset({State.PREFILLING, State.DECODING})
ENDED = frozenset({State.FINISHED, State.CANCELLED, State.TIMED_OUT, State.FAILED})

_BROKEN_OFF = frozenset({State.CANCELLED, State.TIMED_OUT, State.FAILED})
_AFTER = {
    State.WAITING: _BROKEN_OFF | {State.PREFILLING, State.DECODING, State.FINISHED},
    State.PREFILLING: _BROKEN_OFF | {State.DECODING, State.PREEMPTED, State.FINISHED},
    State.DECODING: _BROKEN_OFF | {State.PREEMPTED, State.FINISHED},
    State.PREEMPTED: _BROKEN_OFF | {State.PREFILLING},
}


class Choice:
    """One of a request's answers: what is scheduled, and what a slot belongs to.

    tokens: the prompt's ids, then the answer's. stored: how many of them have KV in the slot.
    In a step, a decoding choice feeds tokens[stored]. Where that is not the last token, the
    choice was preempted and makes its KV again, the way it was made (rule 1c); what the model
    says then is known already.
    """

    def __init__(self, handle: RequestHandle, index: int, row: SamplerRow, text: AnswerText):
        self.handle = handle
        self.index = index
        self.row = row
        self.text = text
        self.state = State.WAITING
        self.tokens = list(handle.request.prompt_ids)
        self.stored = 0
        self.slot = -1
        self.path: Path | None = None  # references into the prefix cache while prefilling
        self.cached_tokens = 0
        self.overtaken = 0  # by requests of a better priority that came later
        self.prompt_logprobs: list[PositionLogprobs | None] = []
        self.reason: str | None = None  # what it ended as: stop, length, cancelled, ...
        self.first_token_s: float | None = None  # when, on the engine's clock; so are the next
        self.ended_s: float | None = None

    @property
    def scored(self) -> bool:
        """Whether logprobs of the prompt's tokens are wanted."""
        return self.row.params.prompt_logprobs is not None

    @property
    def prompt_len(self) -> int:
        return len(self.handle.request.prompt_ids)

    @property
    def produced(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def rank(self) -> tuple[int, int, int]:
        """Who goes first: priority, then arrival, then the choice's index."""
        return self.handle.request.priority, self.handle.arrival, self.index

    def turn(self, patience: int) -> tuple[int, ...]:
        """Its rank among choices of which some were overtaken as often as anybody may be.

        Those go before all others, by arrival.
        """
        overdue = self.overtaken >= patience
        return (0, self.handle.arrival, self.index) if overdue else (1, *self.rank)

    def overtakes(self, others: Iterable[Choice]) -> None:
        """It gets a slot: note whom that overtakes, earlier arrivals of worse priority."""
        for other in others:
            if other.handle.arrival < self.handle.arrival and other.rank > self.rank:
                other.overtaken += 1

    def enter(self, state: State) -> None:
        """Take note of a transition; that it is a possible one is our own invariant."""
        assert state in _AFTER.get(self.state, ()), f"{self.state} -> {state}"
        self.state = state


_ARRIVALS = count()


class RequestHandle:
    """A submitted request: its choices, its events, its end.

    limit: most tokens of each answer. ends: ids that end one. began, deadline, admitted_s (to its
    first slot): on the engine's clock. `error` is set if not every choice ended with a finish
    reason. Events go to `sink`, by default into `events`; `on_end` is called once, after the last
    of them.
    """

    def __init__(
        self,
        request: Request,
        *,
        limit: int,
        ends: frozenset[int],
        began: float,
    ) -> None:
        self.request = request
        self.limit = limit
        self.ends = ends
        self.began = began
        self.deadline = None if request.timeout_s is None else began + request.timeout_s
        self.admitted_s: float | None = None
        self.arrival = next(_ARRIVALS)
        self.choices: list[Choice] = []
        self.forks: list[Choice] = []  # choices that wait for the first one's prompt
        self.error: OrtolanError | None = None
        self.events: deque[TokenEvent] = deque()
        self.sink: Callable[[TokenEvent], None] = self.events.append
        self.on_end: Callable[[], None] = lambda: None

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.state in ENDED for choice in self.choices)
