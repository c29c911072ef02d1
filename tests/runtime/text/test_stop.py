"""Stop strings: found across pieces, never leaked, and nothing held back without need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortolan.errors import RequestError
from ortolan.runtime.text.stop import StopMatcher


def run(stop: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What each push shows, then what flush does; and whether a stop string was found."""
    matcher = StopMatcher(stop)
    shown = [matcher.push(piece) for piece in pieces]
    return [*(text for text, _ in shown), matcher.flush()], any(found for _, found in shown)


def first_to_be_complete(stop: list[str], text: str) -> tuple[str, bool]:
    """The rule, written plainly: the smallest end; with the same end, the smallest start."""
    matches = [
        (at + len(word), at)
        for word in stop
        for at in range(len(text))
        if text.startswith(word, at)
    ]
    return (text[: min(matches)[1]], True) if matches else (text, False)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_result_does_not_depend_on_the_pieces(stop: list[str], pieces: list[str]) -> None:
    """Tokens fall anywhere; the answer must end at the same character."""
    shown, found = run(stop, pieces)
    assert ("".join(shown), found) == first_to_be_complete(stop, "".join(pieces))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text=st.text("abc", max_size=16),
)
def test_only_a_real_partial_match_is_held_back(stop: list[str], text: str) -> None:
    """Holding back the longest stop's length makes streams stutter (vllm#11089)."""
    matcher = StopMatcher(stop)
    shown, found = matcher.push(text)
    if not found:
        starts = {word[:size] for word in stop for size in range(1, len(word))}
        longest = max(
            (s for s in range(len(text) + 1) if text[len(text) - s :] in starts), default=0
        )
        assert text[len(shown) :] == text[len(text) - longest :]


def test_stop_string_across_tokens_does_not_leak_its_start() -> None:
    """Its first characters would reach the client before it is recognised (vllm#3574)."""
    assert run(["###END"], ["a #", "##", "EN", "D b"]) == (["a ", "", "", "", ""], True)


def test_partial_match_that_fails_is_shown() -> None:
    assert run(["###END"], ["a ##", "#EX"]) == (["a ", "###EX", ""], False)


def test_partial_match_at_the_end_is_shown() -> None:
    """An answer that ends in half a stop string must keep it."""
    assert run(["\n\n"], ["a\n"]) == (["a", "\n"], False)


def test_nothing_comes_after_a_stop_string() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_match_inside_a_longer_partial_match_wins() -> None:
    """Waiting for the longer one could wait for ever."""
    assert run(["abcd", "bc"], ["abc", "d"]) == (["a", "", ""], True)


def test_no_stop_strings_hold_nothing_back() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], False)


def test_empty_stop_string_is_refused() -> None:
    """It would end every answer at once (sglang#38712)."""
    with pytest.raises(RequestError, match="stop"):
        StopMatcher(["a", ""])
