"""The queue: priority classes, first come first served in each, and nobody starves."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from ortolan.errors import OverloadedError
from ortolan.runtime.engine.life import Choice


class WaitingQueue:
    """Choices that wait for a slot, in the order in which they may have one.

    Better (lower) priorities go first, and in each the earliest arrival, preempted ones
    included. Whoever has been overtaken by `patience` later arrivals goes before everybody who
    has not; so at most `patience` requests, and those that were overtaken as often before, ever
    come between.
    """

    def __init__(self, max_choices: int, max_tokens: int, patience: int) -> None:
        self._max_choices = max_choices
        self._max_tokens = max_tokens
        self._patience = patience
        self._choices: list[Choice] = []  # by rank
        self.tokens = 0  # of the prompts

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def check_room(self, waiting: int, choices: int, tokens: int, retry_after_s: float) -> None:
        """Raises OverloadedError if another request does not fit beside those that wait.

        waiting: choices that wait, those included that are not queued before their prompt is read.
        Where nothing waits, any request may: it would not fit better later.
        """
        if not self._choices:
            return
        if waiting + choices > self._max_choices:
            raise OverloadedError(
                f"{waiting} answers are waiting, and at most {self._max_choices} may; "
                f"try again in {retry_after_s:.0f} s",
                retry_after_s,
            )
        if self.tokens + tokens > self._max_tokens:
            raise OverloadedError(
                f"{self.tokens} prompt tokens are waiting, and at most {self._max_tokens} may; "
                f"try again in {retry_after_s:.0f} s",
                retry_after_s,
            )

    def add(self, choice: Choice) -> None:
        """At its place by rank: a preempted choice keeps its turn."""
        insort(self._choices, choice, key=lambda item: item.rank)
        self.tokens += choice.prompt_len

    def remove(self, choice: Choice) -> None:
        """Take out a choice that waits here."""
        self._choices.remove(choice)
        self.tokens -= choice.prompt_len

    def first(self) -> Choice | None:
        """Who is next."""
        if not self._choices:
            return None
        overdue = [choice for choice in self._choices if choice.overtaken >= self._patience]
        if overdue:
            return min(overdue, key=lambda choice: choice.turn(self._patience))
        return self._choices[0]

    def admit(self, choice: Choice) -> None:
        """Take out `choice`, which overtakes some of the others."""
        self.remove(choice)
        choice.overtakes(self._choices)
