"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ortolan.errors import RequestError


@dataclass
class _State:
    """How far the end of the text is into a stop string.

    depth: characters at the end that begin one. match: length of the longest that ends here.
    """

    depth: int
    match: int = 0
    next: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None  # the next shorter end of the text that begins a stop string


class StopMatcher:
    """Cuts one answer's text at the first stop string (Aho-Corasick, linear time).

    The first one to be complete wins, and among those that end together the one that starts
    first; so the result does not depend on how the text was cut into pieces. Held back is only
    what may still become a stop string.
    Raises RequestError for an empty stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise RequestError("stop holds an empty string, which matches everywhere; remove it")
        self._start = self._state = _automaton(stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was found.

        After one was found, nothing more comes out.
        """
        if self._stopped:
            return "", True
        read = len(self._held)
        text = self._held + text
        for position in range(read, len(text)):
            self._state = self._step(text[position])
            if self._state.match:
                self._held, self._stopped = "", True
                return text[: position + 1 - self._state.match], True
        safe = len(text) - self._state.depth
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        held, self._held, self._state = self._held, "", self._start
        return held

    def _step(self, character: str) -> _State:
        state: _State | None = self._state
        while state is not None and character not in state.next:
            state = state.shorter
        return state.next[character] if state is not None else self._start


def _automaton(stop: Sequence[str]) -> _State:
    start = _State(depth=0)
    for text in stop:
        state = start
        for character in text:
            state = state.next.setdefault(character, _State(depth=state.depth + 1))
        state.match = len(text)
    # Breadth first: a shorter end has its own links before a longer one needs them.
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        for character, after in state.next.items():
            shorter = state.shorter
            while shorter is not None and character not in shorter.next:
                shorter = shorter.shorter
            after.shorter = shorter.next[character] if shorter is not None else start
            after.match = after.match or after.shorter.match
            waiting.append(after)
    return start
