"""A Jinja sandbox whose templates cannot take a machine's time or memory without end.

A rendering has a `Budget` of steps (loop iterations, calls) and of characters (or list items)
that it may build. Whatever can make a value much larger than its parts asks the budget first; what
no chat template needs and cannot be bounded so is not there. There is no time limit beside it: an
alarm works in the main thread only, and Python cannot end a thread that is busy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.filters import do_format, do_indent, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_VALUE_CHARS = 16 * 1024 * 1024
MAX_BUILT_CHARS = 256 * 1024 * 1024
ITEM_CHARS = 16  # an item of a list, and a number, count as so many characters
MAX_NUMBER_BITS = 4096

STEP_FILTER = "ortolan_steps"
CONCAT_FILTER = "ortolan_concat"

# The filters that stay. Those that are absent (urlize, wordwrap, center, batch, ...) no chat
# template needs, and they take time or memory that cannot be told from their arguments.
_FILTERS = [
    "abs",
    "attr",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "sort",
    "string",
    "sum",
    "title",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
]
_PADDING_METHODS = {"center", "expandtabs", "ljust", "rjust", "translate", "zfill"}
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


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, asking the budget. Nothing is computed when it compiles."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(optimized=False, finalize=_printed, **settings)
        kept = {name: self.filters[name] for name in _FILTERS}
        self.filters = kept | {
            "format": _format,
            "indent": _indent,
            "join": _join,
            "replace": _replace,
            "string": _string,
            "tojson": _to_json,
            STEP_FILTER: _counted,
            CONCAT_FILTER: _concat_values,
        }
        self.concat = _concat  # type: ignore[method-assign]  # what the compiled code joins with
        del self.globals["lipsum"]

    def bounded(self, source: str) -> nodes.Template:
        """The template's tree; its loops count their steps and `~` asks for its result."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, STEP_FILTER)
        _AskingConcat().visit(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also refuses the methods that pad a text to any length."""
        padding = isinstance(obj, str) and attr in _PADDING_METHODS
        return not padding and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format as Jinja's sandbox has it, for formats without a great width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in the base class: a template may pass arguments of any name)
        """Calls are steps: macros can call themselves."""
        Budget.step()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            match __obj.__name__, args:
                case "join", (parts,):
                    args = (_ask_join(text, parts),)
                case "replace", (str() as old, str() as new, *_):
                    _ask_replace(text, old, new)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that make large values out of small ones."""
        match operator, left, right:
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                Budget.build(_length(left) + _length(right))
            case "*", (str() | list() | tuple()), int():
                Budget.build(_length(left) * right)
            case "*", int(), (str() | list() | tuple()):
                Budget.build(left * _length(right))
            case "*", int(), int():
                _check_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                _check_bits(left.bit_length() * abs(right))
            case "%", str(), _:
                _check_format(left)
                Budget.build(len(left) + _size(right))
        return super().call_binop(context, operator, left, right)


class _AskingConcat(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802  (Jinja's name)
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT_FILTER)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        Budget.step()
        yield item


@pass_context  # with it, nothing printed is computed at compile time
def _printed(context: Context, value: Any) -> Any:
    Budget.build(_size(value))
    return value


def _length(value: str | list[Any] | tuple[Any, ...]) -> int:
    return len(value) * (1 if isinstance(value, str) else ITEM_CHARS)


def _size(value: Any) -> int:
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


def _concat(pieces: Iterable[str]) -> str:
    whole = list(pieces)
    Budget.build(sum(map(len, whole)))
    return "".join(whole)


def _concat_values(values: list[Any]) -> str:
    Budget.build(sum(map(_size, values)))
    return "".join(map(str, values))


def _ask_join(separator: str, parts: Iterable[Any]) -> list[Any]:
    whole = list(parts)
    Budget.build(sum(map(_size, whole)) + len(separator) * len(whole))
    return whole


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return str(d).join(map(str, _ask_join(str(d), value)))


def _ask_replace(text: str, old: str, new: str) -> None:
    Budget.build(len(text) + text.count(old) * len(new))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _string(s), _string(old), _string(new)
    _ask_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _string(value: Any) -> str:
    Budget.build(_size(value))
    return str(value)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    spaces = len(width) if isinstance(width, str) else width
    Budget.build(len(s) + (len(s.splitlines()) + 1) * spaces)
    return do_indent(s, width, first, blank)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value))
    Budget.build(_size(value) + _size((args, kwargs)))
    return do_format(value, *args, **kwargs)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes HTML and sorts keys."""
    Budget.build(_size(value) * (1 + (indent or 0) + _size(separators)))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise PastLimitError("it formats to a great or unknown width")


def _check_bits(bits: int) -> None:
    if bits > MAX_NUMBER_BITS:
        raise PastLimitError(f"it computed a number of more than {MAX_NUMBER_BITS} bits")
