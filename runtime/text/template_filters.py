"""Jinja's filters for chat templates: those that can make a value large ask the budget first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Environment, pass_context, pass_environment
from jinja2.filters import (
    FILTERS,
    do_batch,
    do_center,
    do_forceescape,
    do_format,
    do_indent,
    do_urlencode,
    do_wordwrap,
    make_attrgetter,
    sync_do_slice,
)
from jinja2.runtime import Context

from ortolan.runtime.text.template_budget import (
    ITEM_CHARS,
    Budget,
    check_format,
    size_of,
)

# Jinja's own filters that make nothing much larger than what they are given. Left out: urlize,
# striptags, xmlattr and pprint, which no chat template needs, and whose time (regular expressions
# word by word, nested values printed at every level) cannot be told from their arguments; random,
# since the same messages are the same prompt.
_KEPT = [
    "abs",
    "attr",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "groupby",
    "int",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "sort",
    "sum",
    "title",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
]


def concat(pieces: Iterable[str]) -> str:
    """Pieces of output as one text."""
    whole = list(pieces)
    Budget.build(sum(map(len, whole)))
    return "".join(whole)


def concat_values(values: list[Any]) -> str:
    """What the operator `~` makes of its operands."""
    Budget.build(sum(map(size_of, values)))
    return "".join(map(str, values))


def ask_join(separator: str, parts: Iterable[Any]) -> list[Any]:
    """Ask for the joined text; returns the parts."""
    whole = list(parts)
    Budget.build(sum(map(size_of, whole)) + len(separator) * len(whole))
    return whole


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return str(d).join(map(str, ask_join(str(d), value)))


def ask_replace(text: str, old: str, new: str) -> None:
    """Ask for the text with every `old` replaced."""
    Budget.build(len(text) + text.count(old) * len(new))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _string(s), _string(old), _string(new)
    ask_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _string(value: Any) -> str:
    Budget.build(size_of(value))
    return str(value)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    spaces = len(width) if isinstance(width, str) else width
    Budget.build(len(s) + (len(s.splitlines()) + 1) * spaces)
    return do_indent(s, width, first, blank)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    check_format(str(value))
    Budget.build(size_of(value) + size_of((args, kwargs)))
    return do_format(value, *args, **kwargs)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes HTML and sorts keys."""
    Budget.build(size_of(value) * (1 + (indent or 0) + size_of(separators)))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _center(value: Any, width: int = 80) -> str:
    text = value if isinstance(value, str) else _string(value)
    Budget.build(max(len(text), width))
    return do_center(text, width)


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterator[list[Any]]:
    items = list(value)
    Budget.build(ITEM_CHARS * (2 * len(items) + linecount))
    return do_batch(items, linecount, fill_with)


def _slice(value: Iterable[Any], slices: int, fill_with: Any = None) -> Iterator[list[Any]]:
    items = list(value)
    Budget.build(ITEM_CHARS * (len(items) + 2 * slices))
    return sync_do_slice(items, slices, fill_with)


@pass_environment
def _wordwrap(
    environment: Environment,
    s: str,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> str:
    # Measured: some microseconds for each piece of a line, and a word that is longer than the
    # width is copied whole for each line that it takes.
    copied = sum(len(line) ** 2 for line in s.splitlines()) // (32 * max(width, 1))
    Budget.build(len(s) * (64 + len(wrapstring or "")) + copied)
    return do_wordwrap(environment, s, width, break_long_words, wrapstring, break_on_hyphens)


def _forceescape(value: Any) -> str:
    Budget.build(5 * size_of(value))
    return do_forceescape(value)


def _urlencode(value: Any) -> str:
    # Four bytes of three characters each, at the most.
    if not isinstance(value, (str, Mapping)) and isinstance(value, Iterable):
        value = list(value)
    Budget.build(12 * size_of(value))
    return do_urlencode(value)


TEMPLATE_FILTERS: Mapping[str, Callable[..., Any]] = {name: FILTERS[name] for name in _KEPT} | {
    "batch": _batch,
    "center": _center,
    "forceescape": _forceescape,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "slice": _slice,
    "string": _string,
    "tojson": _to_json,
    "urlencode": _urlencode,
    "wordwrap": _wordwrap,
}
