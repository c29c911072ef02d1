"""Telling a chat template's own control tokens from the same characters in a user's text.

A marker is an added token that has a meaning: `<|im_end|>`, `<think>`. Tokenizers match it in
raw text, so a user who types one would speak with the template's voice. Before a template runs,
a guard character is put inside every marker that a user spelled; afterwards the guards become
cuts, positions in the rendered text that no marker may reach across.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

# The private use area: one of these is free as a guard unless a text uses all 6,400.
GUARDS = range(0xE000, 0xF900)


@dataclass(frozen=True)
class RenderedChat:
    """A prompt as a chat template made it.

    cuts: ascending positions in `text` that no control token may reach across, because
    characters beside them came from a message and not from the template.
    """

    text: str
    cuts: tuple[int, ...] = ()

    @classmethod
    def from_guarded(cls, text: str, guard: str) -> RenderedChat:
        """Turn every `guard` character in `text` into a cut."""
        pieces = text.split(guard)
        return cls("".join(pieces), tuple(accumulate(len(piece) for piece in pieces[:-1])))


class Markers:
    """A set of markers, and how to find and break them in text."""

    def __init__(self, spellings: Collection[str]) -> None:
        # One character cannot be broken; no template uses such a marker.
        spellings = [text for text in spellings if len(text) > 1]
        self._spellings = spellings
        self._start = _first_characters(spellings)
        self._heads = {text[:size] for text in spellings for size in range(1, len(text))}
        self._tails = {text[size:] for text in spellings for size in range(1, len(text))}
        self._longest = max(map(len, spellings), default=0)

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._spellings))  # needed only for chats with cuts

    def guarded(self, text: str, guard: str) -> str:
        """`text` with `guard` inside every marker, and at an end that could complete one.

        Unchanged, after one search, if there is nothing to guard. White space at the ends
        stays there, for templates that trim.
        """
        text = self._start.sub(lambda match: match[0] + guard, text)
        body = text.strip()
        # "<|im_" and "end|>" in two messages that a template joins would make a marker.
        before = guard if self._has_part(body, self._tails, at_end=False) else ""
        after = guard if self._has_part(body, self._heads, at_end=True) else ""
        if not before and not after:
            return text
        start = len(text) - len(text.lstrip())
        return f"{text[:start]}{before}{body}{after}{text[start + len(body) :]}"

    def spans(self, text: str, cuts: Collection[int]) -> Iterator[tuple[int, int]]:
        """Where the markers are in `text`: (start, end), left to right, the longest first."""
        for start, end in pairwise((0, *cuts, len(text))):
            for match in self._whole.finditer(text, start, end):
                yield match.span()

    def _has_part(self, text: str, parts: set[str], *, at_end: bool) -> bool:
        longest = min(self._longest - 1, len(text))
        sizes = range(1, longest + 1)
        if at_end:
            return any(text[-size:] in parts for size in sizes)
        return any(text[:size] in parts for size in sizes)


def _any_of(spellings: Collection[str]) -> str:
    longest_first = sorted(spellings, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or r"(?!)"


def _first_characters(spellings: Collection[str]) -> re.Pattern[str]:
    """Matches the first character of any marker, only where the rest follows.

    One character at a time, so that overlapping markers are all found.
    """
    rests: dict[str, list[str]] = {}
    for text in spellings:
        rests.setdefault(text[0], []).append(text[1:])
    return re.compile(
        "|".join(f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items())
        or r"(?!)"
    )
