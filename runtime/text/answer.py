"""One answer's tokens as text that is safe to show."""

from __future__ import annotations

from ortolan.runtime.params import (
    FinishReason,
    PositionLogprobs,
    Request,
    TokenLogprob,
)
from ortolan.runtime.text.detokenizer import Detokenizer
from ortolan.runtime.text.stop import StopMatcher
from ortolan.runtime.text.tokenizer import Tokenizer


class AnswerText:
    """Holds back what may be half a character or the start of a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues=request.continues)
        self._matcher = StopMatcher(request.params.stop)

    def push(self, token_id: int, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """The text that a token adds, and the finish reason, which a stop string may set.

        reason: the one known already. A token that ends the answer is not part of its text.
        """
        text = "" if reason == "stop" else self._detokenizer.push(token_id)
        if reason is not None:
            text += self._detokenizer.flush()
        text, matched = self._matcher.push(text)
        if matched:
            reason = "stop"
        if reason is not None:
            text += self._matcher.flush()
        return text, reason


def position_logprobs(
    tokenizer: Tokenizer, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]
) -> PositionLogprobs:
    """Ids with their logprobs, and the bytes that they stand for."""

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id, tokenizer.token_bytes(token_id, special=True), logprob)

    return PositionLogprobs(entry(token_id, logprob), tuple(entry(*pair) for pair in top))
