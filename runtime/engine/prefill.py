"""The phase of a step that reads prompts: as much as running requests can bear."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ortolan.errors import EngineError
from ortolan.runtime.engine.chunks import next_chunk
from ortolan.runtime.engine.device_logits import Logits
from ortolan.runtime.engine.emit import Emitter, repeated
from ortolan.runtime.engine.life import Choice, State
from ortolan.runtime.engine.pace import LEAST_CHUNK, Pace
from ortolan.runtime.engine.sampler import not_finite
from ortolan.runtime.engine.scheduler import Scheduler
from ortolan.runtime.engine.seams import ModelSeam

# Where a prompt is scored, the logits of every position are made; this bounds their memory.
_SCORED_CHUNK = 64
# Prompts share a call if padding them to one length adds at most this part.
_MOST_PADDING = 0.25

_Part = tuple[Choice, int]  # whose prompt, how many tokens of it


class PrefillPhase:
    """Cuts the next pieces of prompts, first come first served, and reads them.

    chunk: most tokens of a step. whole: prompts of at most so many are read in one piece, whatever
    the pace.

    prompt_tokens: all that were ever read. seconds: what the model took for them.
    """

    def __init__(
        self,
        model: ModelSeam,
        scheduler: Scheduler,
        emitter: Emitter,
        pace: Pace,
        chunk: int,
        whole: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._emitter = emitter
        self._pace = pace
        self._chunk = chunk
        self._whole = min(whole, chunk)
        self._clock = clock
        self.prompt_tokens = 0
        self.seconds = 0.0

    def run(self, began: float) -> bool:
        """Read prompts; whether there were any. `began` is when the step did."""
        prompts = self._scheduler.prompts()
        if not prompts:
            return False
        running = len(self._scheduler.residents.in_state(State.DECODING))
        most = self._pace.tokens(running, prompts[0].stored, self._clock() - began)
        left = self._chunk if most is None else min(self._chunk, most)
        if prompts[0].prompt_len - prompts[0].cached_tokens <= self._whole:
            left = self._chunk
        for call in list(self._calls(self._parts(prompts, left))):
            if all(choice.state is State.PREFILLING for choice, _ in call):
                self._read(call)
            else:  # an earlier call's events or failure ended some, whose slots are not theirs
                self._one_by_one(call)
        return True

    def probe(self) -> None:
        """After failures in a row: is it the session? If a harmless call fails too, all ends."""
        slot = self._scheduler.residents.free_slot()
        if slot is None:
            return
        try:
            self._model.prefill(slot, [[0, 0]], [0], [[1]])
        except EngineError as exc:
            self._scheduler.stop(str(exc))
        else:
            self._scheduler.call_succeeded()

    def _parts(self, prompts: list[Choice], left: int) -> list[_Part]:
        """Pieces of prompts, of about `left` tokens together."""
        parts: list[_Part] = []
        for choice in prompts:
            remaining = choice.prompt_len - choice.stored
            if parts and left < min(remaining, LEAST_CHUNK):
                break
            most = min(left, _SCORED_CHUNK) if choice.scored else left
            parts.append((choice, next_chunk(remaining, max(most, 2))))
            left -= parts[-1][1]
        return parts

    def _calls(self, parts: list[_Part]) -> Iterator[list[_Part]]:
        """Parts that one prefill call can read: neighbouring slots, and little padding."""
        call: list[_Part] = []
        for part in sorted(parts, key=lambda part: part[0].slot):
            if call and not self._together([*call, part]):
                yield call
                call = []
            call.append(part)
        yield call

    def _together(self, call: list[_Part]) -> bool:
        if not self._model.ragged or call[-1][0].slot != call[-2][0].slot + 1:
            return False
        if any(choice.scored for choice, _ in call):
            return False
        sizes = [size for _, size in call]
        # A prompt of one token is read alone, so that it does not matter who came with it.
        return min(sizes) > 1 and len(sizes) * max(sizes) <= (1 + _MOST_PADDING) * sum(sizes)

    def _read(self, call: list[_Part]) -> None:
        """One prefill call; the prompts that end in it get their first token."""
        ids = [choice.tokens[choice.stored : choice.stored + size] for choice, size in call]
        starts = [choice.stored for choice, _ in call]
        index = [[size - 1] for _, size in call]
        if call[0][0].scored:
            index = [list(range(len(ids[0])))]
        began = self._clock()
        try:
            logits = self._model.prefill(call[0][0].slot, ids, starts, index)
        except EngineError as exc:
            self._retry(call, exc)
            return
        seconds = self._clock() - began
        self.seconds += seconds
        self._scheduler.call_succeeded()
        self._pace.prefilled([len(part) for part in ids], starts, seconds)
        for row, (choice, size) in enumerate(call):
            if choice.state is not State.PREFILLING:
                continue  # ended by what an earlier row's reader did
            choice.stored += size
            self.prompt_tokens += size
            if choice.scored and not choice.produced:
                self._emitter.score(choice, logits[row])
            if choice.state is State.PREFILLING:
                self._piece_read(choice, logits[row, -1:])

    def _retry(self, call: list[_Part], error: EngineError) -> None:
        """After a call that failed: one by one, so that only those that fail alone are ended."""
        if len(call) == 1:
            self._scheduler.call_failed(call[0][0].handle, error)
            return
        self._one_by_one(call)

    def _one_by_one(self, call: list[_Part]) -> None:
        for part in call:
            if part[0].state is State.PREFILLING:
                self._read([part])

    def _piece_read(self, choice: Choice, logits: Logits) -> None:
        """A piece's last logits [1, vocab], which depend on all KV up to there."""
        if not self._emitter.finite(logits):  # nor may the KV be, and nobody may find it
            self._scheduler.fail(choice.handle, not_finite())
            return
        self._scheduler.keep_prefix(choice)
        if choice.stored < choice.prompt_len:
            return
        if choice.handle.limit == 0:
            self._emitter.finish(choice, "length")
        elif choice.produced:  # it was preempted; what follows is known
            self._scheduler.start_decoding(choice)
        else:
            choices = [choice, *self._scheduler.fork(choice)]
            self._scheduler.start_decoding(choice)
            self._emitter.draw(choices, repeated(logits, len(choices)))
