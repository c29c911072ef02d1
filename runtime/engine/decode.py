"""The phase of a step that gives every running row its next token."""

from __future__ import annotations

from collections.abc import Callable

from ortolan.errors import EngineError
from ortolan.runtime.engine.device_logits import Logits
from ortolan.runtime.engine.emit import Emitter
from ortolan.runtime.engine.life import Choice, State
from ortolan.runtime.engine.pace import Pace
from ortolan.runtime.engine.scheduler import Scheduler
from ortolan.runtime.engine.seams import ModelSeam


class DecodePhase:
    """One call over the slots from 0 to the last running one, one sampling call over its rows.

    seconds: what the model has taken.
    """

    def __init__(
        self,
        model: ModelSeam,
        scheduler: Scheduler,
        emitter: Emitter,
        pace: Pace,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._residents = scheduler.residents
        self._emitter = emitter
        self._pace = pace
        self._clock = clock
        self.seconds = 0.0

    def run(self, *, beside_prompt: bool) -> None:
        """Decode, sample, emit. beside_prompt: whether this step has read a piece of a prompt."""
        choices = self._residents.in_state(State.DECODING)
        if not choices:
            return
        began = self._clock()
        choices.sort(key=lambda choice: choice.slot)
        multiple = self._model.row_multiple
        rows = -(-(choices[-1].slot + 1) // multiple) * multiple
        try:
            logits = self._feed(choices, 0, rows)
        except EngineError:
            self._one_by_one(choices)
            return
        self._sample(choices, logits, first=0)
        self._pace.decoded(rows, self._clock() - began, beside_prompt=beside_prompt)
        self._scheduler.close_gap(rows)

    def _feed(self, choices: list[Choice], first: int, rows: int) -> Logits:
        """Decode the choices' next tokens, over the slots from `first` on; logits [rows, vocab].

        Rows of other slots run as well. They write where their slot's next token will be, which
        is written again before it is read.
        """
        ids, lengths = [0] * rows, self._lengths(first, rows)
        for choice in choices:
            ids[choice.slot - first] = choice.tokens[choice.stored]
        began = self._clock()
        logits = self._model.decode(first, ids, lengths)
        self.seconds += self._clock() - began
        self._scheduler.call_succeeded()
        return logits

    def logits_of(self, slot: int, token_id: int, length: int) -> Logits:
        """Logits [1, vocab] after one more token in a slot that no request has."""
        rows = self._model.row_multiple
        first = min(slot, self._model.cache.slots - rows)
        ids, lengths = [0] * rows, self._lengths(first, rows)
        ids[slot - first], lengths[slot - first] = token_id, length
        return self._model.decode(first, ids, lengths)[slot - first : slot - first + 1]

    def _lengths(self, first: int, rows: int) -> list[int]:
        """Tokens that requests hold in the slots from `first` on."""
        lengths = [0] * rows
        for choice in self._residents:
            if 0 <= choice.slot - first < rows:
                lengths[choice.slot - first] = choice.stored
        return lengths

    def _one_by_one(self, choices: list[Choice]) -> None:
        """After a call that failed: each row alone, so that only those that fail are ended."""
        rows = self._model.row_multiple
        for choice in choices:
            if choice.state is not State.DECODING:
                continue  # its request ended, with a sibling
            first = min(choice.slot, self._model.cache.slots - rows)
            try:
                logits = self._feed([choice], first, rows)
            except EngineError as exc:
                self._scheduler.call_failed(choice.handle, exc)
            else:
                self._sample([choice], logits, first)

    def _sample(self, choices: list[Choice], logits: Logits, first: int) -> None:
        """Draw for the choices that have fed their last token; logits from slot `first` on."""
        for choice in choices:
            choice.stored += 1
        fresh = [choice for choice in choices if choice.stored == len(choice.tokens)]
        if not fresh:
            return
        places = [choice.slot - first for choice in fresh]
        if places != list(range(len(places))):
            logits = logits[places]
        self._emitter.draw(fresh, logits)
