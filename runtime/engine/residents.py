"""Who is in which slot, and how much of the KV budget that takes."""

from __future__ import annotations

from collections.abc import Iterator

from ortolan.runtime.engine.life import RESIDENT, Choice, State
from ortolan.runtime.engine.seams import KvSeam

# What a running request is expected to grow by before another could be preempted for it:
# admitting up to the brim would preempt the newcomer at once, and waste its prefill.
_HEADROOM_TOKENS = 16
# A free slot keeps its pages for so many steps, for whoever comes next: to return and touch them
# again would cost each short request 3 % of its time.
_KEPT_STEPS = 32


class Residents:
    """Slots with their choices, and a budget of tokens.

    A choice counts with all its tokens, which is what its slot holds after the next step.
    """

    def __init__(self, cache: KvSeam, slots: int, budget: int) -> None:
        self._cache = cache
        self._slots: list[Choice | None] = [None] * slots
        self._kept = [0] * slots  # tokens whose pages a free slot still has
        self._kept_steps = [0] * slots
        self.budget = budget
        self.kv_tokens = 0

    def __iter__(self) -> Iterator[Choice]:
        return (choice for choice in self._slots if choice is not None)

    def __len__(self) -> int:
        return sum(choice is not None for choice in self._slots)

    def in_state(self, state: State) -> list[Choice]:
        """By rank."""
        found = [choice for choice in self if choice.state is state]
        return sorted(found, key=lambda choice: choice.rank)

    def fits(self, tokens: int) -> bool:
        """Whether there is a slot and budget for a choice of so many tokens, and some growth."""
        residents = len(self)
        headroom = _HEADROOM_TOKENS * (residents + 1) if residents else 0
        return residents < len(self._slots) and self.kv_tokens + tokens + headroom <= self.budget

    def enter(self, choice: Choice) -> None:
        """Give a choice the lowest free slot."""
        choice.slot = self._slots.index(None)
        self._occupy(choice.slot, choice, len(choice.tokens))
        choice.stored = 0
        self.kv_tokens += len(choice.tokens)

    def leave(self, choice: Choice) -> None:
        """Free a choice's slot and tokens."""
        assert self._slots[choice.slot] is choice
        self._vacate(choice.slot, choice.stored + 1)
        self.kv_tokens -= len(choice.tokens)
        choice.slot = -1
        choice.stored = 0

    def grow(self, choice: Choice, token_id: int) -> None:
        """A choice has one more token."""
        choice.tokens.append(token_id)
        self.kv_tokens += 1

    def to_preempt(self, patience: int) -> Choice | None:
        """The latest arrival of the worst priority, but first those who were not overtaken often.

        What was preempted makes its KV again step by step. If those who overtook it could push
        it out each time before it is through, it would never end.
        """
        return max(self, key=lambda choice: choice.turn(patience), default=None)

    def free_slot(self) -> int | None:
        """The lowest slot that nobody is in."""
        return self._slots.index(None) if None in self._slots else None

    def move(self, choice: Choice, slot: int) -> None:
        """Move a choice to a free slot, with its KV."""
        assert self._slots[slot] is None
        old = choice.slot
        self._cache.copy(old, slot, choice.stored)
        self._occupy(slot, choice, choice.stored)
        self._vacate(old, choice.stored + 1)
        choice.slot = slot

    def return_pages(self) -> None:
        """Once per step: free slots give back pages that nobody has come for.

        At once where nobody runs any more, or where kept pages do not fit in the budget beside
        those in use.
        """
        at_once = not len(self) or self.kv_tokens + sum(self._kept) > self.budget
        for slot, tokens in enumerate(self._kept):
            self._kept_steps[slot] += 1
            if tokens and (at_once or self._kept_steps[slot] > _KEPT_STEPS):
                self._cache.discard(slot, tokens)
                self._kept[slot] = 0

    def _occupy(self, slot: int, choice: Choice, tokens: int) -> None:
        self._slots[slot] = choice
        if self._kept[slot] > tokens:  # more than the newcomer counts for
            self._cache.discard(slot, self._kept[slot], tokens)
        self._kept[slot] = 0

    def _vacate(self, slot: int, tokens: int) -> None:
        self._slots[slot] = None
        self._kept[slot], self._kept_steps[slot] = tokens, 0

    def check(self) -> None:
        """Our invariants: slots and tokens are those of the choices that are resident."""
        for slot, choice in enumerate(self._slots):
            if choice is not None:
                assert choice.slot == slot
                assert not self._kept[slot]
                assert choice.state in RESIDENT
                assert 0 <= choice.stored <= len(choice.tokens) <= self._cache.capacity
                assert choice.state is State.PREFILLING or choice.path is None
        assert self.kv_tokens == sum(len(choice.tokens) for choice in self)
