"""Who runs, who waits, who has to go: every transition of a request's life, in one place."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from ortolan.errors import EngineError, OrtolanError, TimedOutError
from ortolan.runtime.engine.life import ENDED, QUEUED, RESIDENT, Choice, RequestHandle, State
from ortolan.runtime.engine.prefix_cache import PrefixCache
from ortolan.runtime.engine.residents import Residents
from ortolan.runtime.engine.seams import KvSeam
from ortolan.runtime.engine.waiting import WaitingQueue
from ortolan.runtime.params import EngineConfig, FinishReason

# So many calls that fail one after the other may be the sessions' fault, not the requests'.
_FAILURES_OF_SESSIONS = 3
# A dead row in the middle costs each step about as much as moving the KV of so many tokens.
_TOKENS_PER_DEAD_ROW = 32
# So many requests with a deadline are held at least before those that have ended are sought.
_DEADLINES = 32


class Scheduler:
    """The queue, the slots with their budget, and the prefix cache, kept in step.

    kv_budget: most tokens whose KV running requests may hold. prefix: KV of earlier prompts;
    None: nothing is kept.
    broken: why nothing can run any more; None while it can.
    ended: stop, length, cancelled, timed out, failed -> choices that ended so.
    """

    def __init__(
        self,
        cache: KvSeam,
        config: EngineConfig,
        kv_budget: int,
        prefix: PrefixCache | None,
        clock: Callable[[], float],
    ) -> None:
        self.queue = WaitingQueue(
            config.max_waiting, config.max_waiting_tokens, config.priority_patience
        )
        self.residents = Residents(cache, config.max_slots, kv_budget)
        self.prefix = prefix
        self.broken: str | None = None
        self.preemptions = 0
        self.ended: Counter[str] = Counter()
        self._cache = cache
        self._clock = clock
        self._patience = config.priority_patience
        self._deadlines: list[tuple[float, int, RequestHandle]] = []  # a heap
        self._deadlines_kept = 0  # of it, after ended requests were last taken out
        self._failures = 0  # calls that failed since the last one that did not
        self._dead_rows = 0  # rows decoded for nothing since the last move

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(len(self.residents) or len(self.queue))

    @property
    def waiting(self) -> int:
        """Choices that have no slot yet, or no longer."""
        forks = sum(len(choice.handle.forks) for choice in (*self.queue, *self.residents))
        return len(self.queue) + forks

    # Into the queue and out of it.

    def enqueue(self, handle: RequestHandle) -> None:
        """A new request's first choice queues; the others wait for its prompt to be read."""
        first, *handle.forks = handle.choices
        if handle.deadline is not None:
            self._forget_ended()
            heapq.heappush(self._deadlines, (handle.deadline, handle.arrival, handle))
        self.queue.add(first)

    def _forget_ended(self) -> None:
        # Otherwise a request that has ended would be held until its time is over. Taken out when
        # the heap has doubled, which costs constant time per request.
        if len(self._deadlines) > 2 * self._deadlines_kept + _DEADLINES:
            self._deadlines = [item for item in self._deadlines if not item[2].done]
            heapq.heapify(self._deadlines)
            self._deadlines_kept = len(self._deadlines)

    def expire(self, now: float) -> None:
        """End requests whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            handle = heapq.heappop(self._deadlines)[2]
            if not handle.done:
                seconds = handle.request.timeout_s
                error = TimedOutError(f"the request's time of {seconds:g} s is over")
                self.end(handle, State.TIMED_OUT, error)

    def make_room(self) -> None:
        """Preempt the youngest of the worst priority while running requests outgrow the budget.

        Those who were overtaken as often as anybody may be are the last to go.
        """
        while self.residents.kv_tokens > self.residents.budget:
            choice = self.residents.to_preempt(self._patience)
            assert choice is not None
            self.preemptions += 1
            self._move(choice, State.PREEMPTED)

    def admit(self) -> None:
        """Give slots to those who are first in the queue, as long as there is room for them."""
        while (choice := self.queue.first()) is not None and self.residents.fits(
            len(choice.tokens)
        ):
            self._move(choice, State.PREFILLING)
            if self.prefix is not None:
                self._reuse(choice, self.prefix)
            if not choice.produced:
                choice.cached_tokens = choice.stored

    def _reuse(self, choice: Choice, prefix: PrefixCache) -> None:
        # Two tokens run again at least: a one-token chunk has other bits (rule 1a). A prompt
        # that is scored needs the logits of all.
        most = 0 if choice.scored and not choice.produced else choice.prompt_len - 2
        ids = choice.tokens[: choice.prompt_len]
        choice.path = prefix.find(choice.handle.request.salt, ids, most)
        prefix.load(choice.path, choice.slot)
        choice.stored = choice.path.tokens

    # From prompt to answer.

    def prompts(self) -> list[Choice]:
        """Those whose prompts are being read, in their turn."""
        found = self.residents.in_state(State.PREFILLING)
        return sorted(found, key=lambda choice: choice.turn(self._patience))

    def fork(self, choice: Choice) -> list[Choice]:
        """Choices that start from a copy of the first one's KV; those without room queue."""
        handle, forked = choice.handle, []
        for fork in tuple(handle.forks):
            if not self.residents.fits(len(fork.tokens)):
                handle.forks.remove(fork)
                self.queue.add(fork)
                continue
            self._move(fork, State.DECODING)
            self._cache.copy(choice.slot, fork.slot, choice.stored)
            fork.stored = choice.stored
            fork.cached_tokens = choice.cached_tokens
            fork.prompt_logprobs = choice.prompt_logprobs
            forked.append(fork)
        return forked

    def keep_prefix(self, choice: Choice) -> None:
        """Store the KV of what has been read of a prompt, whose logits are finite (rule 1b).

        After every piece: storing a long prompt at once would stall the running rows.
        """
        if self.prefix is not None and choice.path is not None:
            read = choice.tokens[: min(choice.stored, choice.prompt_len)]
            choice.path = self.prefix.extend(choice.path, read, choice.slot)

    def start_decoding(self, choice: Choice) -> None:
        """The prompt has been read."""
        self._move(choice, State.DECODING)

    def close_gap(self, decoded_rows: int) -> None:
        """Move the last running row into a free slot below it, once dead rows have cost more.

        decoded_rows: what the last step ran, dead ones included.
        """
        decoding = self.residents.in_state(State.DECODING)
        hole = self.residents.free_slot()
        last = max(decoding, key=lambda choice: choice.slot, default=None)
        if last is None or hole is None or hole > last.slot:
            self._dead_rows = 0
            return
        self._dead_rows += decoded_rows - len(decoding)
        if self._dead_rows * _TOKENS_PER_DEAD_ROW >= last.stored:
            self.residents.move(last, hole)
            self._dead_rows = 0

    # To the end.

    def finish(self, choice: Choice, reason: FinishReason) -> None:
        """A choice ended as it should."""
        self._end(choice, State.FINISHED, reason)
        if choice.handle.done:
            choice.handle.on_end()

    def end(self, handle: RequestHandle, state: State, error: OrtolanError) -> None:
        """Break a request off, with all choices that have not ended."""
        if handle.done:
            return
        for choice in handle.choices:
            if choice.state not in ENDED:
                self._end(choice, state, state.value)
        handle.error = error
        handle.on_end()

    def _end(self, choice: Choice, state: State, reason: str) -> None:
        self.ended[reason] += 1
        choice.reason, choice.ended_s = reason, self._clock()
        self._move(choice, state)

    def fail(self, handle: RequestHandle, error: EngineError) -> None:
        """Something of this request alone went wrong."""
        self.end(handle, State.FAILED, error)

    def call_succeeded(self) -> None:
        """The sessions work."""
        self._failures = 0

    def call_failed(self, handle: RequestHandle, error: EngineError) -> None:
        """A call for this request alone failed."""
        self.fail(handle, error)
        self._failures += 1

    @property
    def suspicious(self) -> bool:
        """Whether so many calls failed in a row that the sessions themselves may be at fault."""
        return self._failures >= _FAILURES_OF_SESSIONS

    def break_off(self, reason: str) -> None:
        """A step did not come to its end: neither can what was running."""
        for choice in tuple(self.residents):
            error = EngineError(f"a step of the engine broke off ({reason})")
            self.end(choice.handle, State.FAILED, error)

    def stop(self, reason: str) -> None:
        """Nothing can run any more: end everything."""
        self.broken = reason
        for choice in (*self.queue, *self.residents):
            error = EngineError(f"the engine stopped working: {reason}")
            self.end(choice.handle, State.FAILED, error)

    def _move(self, choice: Choice, state: State) -> None:
        """A transition: frees exactly what the state before held, takes what the next one holds."""
        handle = choice.handle
        if choice in handle.forks:
            handle.forks.remove(choice)
        elif choice.state in QUEUED and state in RESIDENT:
            self.queue.admit(choice)
            # A prompt that is being read waits too: better ones are read first.
            choice.overtakes(self.residents.in_state(State.PREFILLING))
        elif choice.state in QUEUED:
            self.queue.remove(choice)
        if state in RESIDENT and handle.admitted_s is None:
            handle.admitted_s = self._clock()
        if choice.path is not None:
            assert self.prefix is not None
            self.prefix.release(choice.path)
            choice.path = None
        if choice.state in RESIDENT and state not in RESIDENT:
            self.residents.leave(choice)
        elif choice.state not in RESIDENT and state in RESIDENT:
            self.residents.enter(choice)
        choice.enter(state)
        if state in QUEUED:
            self.queue.add(choice)

    def verify(self) -> None:
        """Our invariants: slots, budget, queue and cache references are all accounted for."""
        self.residents.check()
        for choice in self.queue:
            assert choice.state in QUEUED
            assert choice not in choice.handle.forks
        assert self.queue.tokens == sum(choice.prompt_len for choice in self.queue)
        if self.prefix is not None:
            paths = [choice.path for choice in self.residents if choice.path is not None]
            self.prefix.check(paths)
