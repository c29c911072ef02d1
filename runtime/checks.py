"""Checks of what callers give: the value in its own type, or a RequestError that names it."""

from __future__ import annotations

import math
import reprlib
from numbers import Integral, Real

from ortolan.errors import RequestError


def shown(value: object) -> str:
    """The value as an error shows it: bounded, so that no error echoes a huge input."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer past Python's limit on decimal digits
        return f"a {type(value).__name__} too long to show"


def refused(name: str, value: object, accepted: str) -> RequestError:
    """The error for a value that is not what is accepted."""
    return RequestError(f"{name} is {shown(value)}; it must be {accepted}")


def _range(low: float, high: float | None, above: bool = False) -> str:
    if high is None:
        return f"above {low:g}" if above else f"of at least {low:g}"
    return f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number within the bounds."""
    # bool is an int to Python; in a request it is a mistake.
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise refused(name, value, f"a whole number {bounds}")


def optional_whole(name: str, value: object, low: int, high: int | None = None) -> int | None:
    """The same, or None."""
    return None if value is None else whole(name, value, low, high)


def number(
    name: str, value: object, low: float, high: float | None = None, *, above: bool = False
) -> float:
    """A finite float within [low, high], or (low, high] with `above`."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        inside = number > low if above else number >= low
        if math.isfinite(number) and inside and (high is None or number <= high):
            return number
    raise refused(name, value, f"a finite number {_range(low, high, above)}")


def flag(name: str, value: object) -> bool:
    """True or false, and nothing that only counts as such."""
    if isinstance(value, bool):
        return value
    raise refused(name, value, "true or false")


def at_most(name: str, length: int, items: str, most: int) -> None:
    """Whether a list is short enough."""
    if length > most:
        raise RequestError(f"{name} holds more than {most} {items}; that is the most here")
