"""From logits to events: drawing tokens, turning them into text, ending answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ortolan.errors import EngineError
from ortolan.runtime.engine.device_logits import Logits
from ortolan.runtime.engine.life import ENDED, Choice
from ortolan.runtime.engine.sampler import Sampled
from ortolan.runtime.engine.scheduler import Scheduler
from ortolan.runtime.engine.seams import SamplerSeam
from ortolan.runtime.params import FinishReason, PositionLogprobs, TokenEvent, Usage
from ortolan.runtime.text.answer import position_logprobs
from ortolan.runtime.text.tokenizer import Tokenizer


class Emitter:
    """Draws a token for each choice and sends it to the request's reader.

    completion_tokens: all that were ever drawn. seconds: what it has taken, readers included.
    """

    def __init__(
        self,
        sampler: SamplerSeam,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        clock: Callable[[], float],
    ) -> None:
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._clock = clock
        self.completion_tokens = 0
        self.seconds = 0.0

    def draw(self, choices: Sequence[Choice], logits: Logits) -> None:
        """A token for each choice from logits [rows, vocab].

        A choice whose logits are not fails with its request, and no other does.
        """
        began = self._clock()
        drawn: Sequence[Sampled | EngineError]
        try:
            drawn = self._sampler.sample(logits, [choice.row for choice in choices])
        except EngineError as exc:
            drawn = [exc] * len(choices)
        for choice, sampled in zip(choices, drawn, strict=True):
            if choice.state in ENDED:
                continue  # with its request, which another choice made fail
            if isinstance(sampled, EngineError):
                self._scheduler.fail(choice.handle, sampled)
            else:
                self._emit(choice, sampled)
        self.seconds += self._clock() - began

    def score(self, choice: Choice, logits: Logits) -> None:
        """Add logprobs of the prompt's tokens after the positions [n, vocab] just read."""
        known = choice.prompt_logprobs
        first = choice.stored - len(logits) + 1  # the token that the first of them predicts
        if first == 1:
            known[:] = [None]
        following = choice.tokens[first : min(choice.stored + 1, choice.prompt_len)]
        if not following:
            return
        count = choice.row.params.prompt_logprobs or 0
        began = self._clock()
        try:
            scores = self._sampler.score(logits[: len(following)], following, count)
        except EngineError as exc:
            self._scheduler.fail(choice.handle, exc)
            return
        known += [self._logprobs(score)[0] for score in scores]
        self.seconds += self._clock() - began

    def finite(self, logits: Logits) -> bool:
        """Whether logits [1, vocab] are."""
        return self._sampler.finite(logits)

    def finish(self, choice: Choice, reason: FinishReason) -> None:
        """End a request for no tokens, whose prompt has been read if it is to be scored."""
        for each in choice.handle.choices:
            if each.state not in ENDED:  # with its request, by what its reader did
                each.prompt_logprobs = choice.prompt_logprobs
                self._send(each, "", (), reason, ())

    def _emit(self, choice: Choice, sampled: Sampled) -> None:
        token_id, handle = sampled.token_id, choice.handle
        self.completion_tokens += 1
        if choice.first_token_s is None:
            choice.first_token_s = self._clock()
        self._scheduler.residents.grow(choice, token_id)
        choice.row.append(token_id)
        reason: FinishReason | None = None
        if token_id in handle.ends:
            reason = "stop"
        elif choice.produced == handle.limit:
            reason = "length"
        text, reason = choice.text.push(token_id, reason)
        self._send(choice, text, (token_id,), reason, self._logprobs(sampled))

    def _logprobs(self, sampled: Sampled) -> tuple[PositionLogprobs, ...]:
        if sampled.logprob is None:
            return ()
        top = sampled.top_logprobs
        return (position_logprobs(self._tokenizer, sampled.token_id, sampled.logprob, top),)

    def _send(
        self,
        choice: Choice,
        text: str,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        logprobs: tuple[PositionLogprobs, ...],
    ) -> None:
        usage = None
        if reason is not None:
            usage = Usage(choice.prompt_len, choice.produced, choice.cached_tokens)
        scored: tuple[PositionLogprobs | None, ...] = ()
        if choice.produced <= 1:  # the first event
            scored = tuple(choice.prompt_logprobs)
        event = TokenEvent(text, token_ids, reason, usage, logprobs, choice.index, scored)
        try:
            choice.handle.sink(event)
        except Exception as exc:  # noqa: BLE001  a reader's fault must not cost other rows their token
            error = EngineError(f"the request's reader failed: {type(exc).__name__}: {exc}")
            self._scheduler.fail(choice.handle, error)
        # The reader may have cancelled the request.
        if reason is not None and choice.state not in ENDED:
            self._scheduler.finish(choice, reason)


def repeated(logits: Logits, rows: int) -> Logits:
    """Logits [1, vocab] for several choices that start alike."""
    return logits if rows == 1 else logits[[0] * rows]
