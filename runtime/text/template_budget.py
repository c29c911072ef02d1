"""What one rendering of a template may still do, and how large values are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

MAX_VALUE_CHARS = 16 * 1024 * 1024
MAX_BUILT_CHARS = 256 * 1024 * 1024
ITEM_CHARS = 16  # an item of a list, and a number, count as so many characters
MAX_NUMBER_BITS = 4096

# A width of five digits, or one that is taken from the arguments, in "%5d" and in "{:5}".
_WIDE = re.compile(r"%(?:\([^)]*\))?[-#0 +.\d]*(?:\*|\d{5})|\{[^{}]*:[^{}]*(?:\{|\d{5})")


class PastLimitError(Exception):
    """A template ran too long or built too much."""


class Budget:
    """What one rendering may still do; `with budget:` makes it the one that is asked."""

    _current: ContextVar[Budget] = ContextVar("budget")

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._steps = 0
        self._chars = 0

    def __enter__(self) -> None:
        self._token = self._current.set(self)

    def __exit__(self, *error: object) -> None:
        self._current.reset(self._token)

    @classmethod
    def step(cls) -> None:
        """Count a loop's iteration or a call. Raises PastLimitError at the limit."""
        budget = cls._current.get()
        budget._steps += 1
        if budget._steps > budget._max_steps:
            raise PastLimitError(
                f"its loops and calls took more than {budget._max_steps} steps together"
            )

    @classmethod
    def build(cls, chars: int) -> None:
        """Ask for a value of this size. Raises PastLimitError if it is too large."""
        budget = cls._current.get()
        budget._chars += max(chars, 0)
        if chars > MAX_VALUE_CHARS or budget._chars > MAX_BUILT_CHARS:
            raise PastLimitError("it built more text than a prompt can hold")


def length_of(value: str | list[Any] | tuple[Any, ...]) -> int:
    """About how many characters a text has, or a list without what is in its items."""
    return len(value) * (1 if isinstance(value, str) else ITEM_CHARS)


def size_of(value: Any) -> int:
    """About how many characters a value has as text; what is in it twice counts twice."""
    size = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item
        size += 0 if isinstance(item, str) else ITEM_CHARS
        if size > MAX_VALUE_CHARS:
            break
    return size


def check_format(text: str) -> None:
    """Raises PastLimitError for a format that may pad to any width."""
    if _WIDE.search(text):
        raise PastLimitError("it formats to a great or unknown width")


def check_bits(bits: int) -> None:
    """Raises PastLimitError for a number of so many bits."""
    if bits > MAX_NUMBER_BITS:
        raise PastLimitError(f"it computed a number of more than {MAX_NUMBER_BITS} bits")
