"""A Jinja sandbox whose templates cannot take a machine's time or memory without end.

A rendering has a `Budget` of steps (loop iterations, calls) and of characters (or list items)
that it may build. Whatever can make a value much larger than its parts asks the budget first: the
operators and methods here, the filters in `template_filters`; what cannot be bounded so is not
there. There is no time limit beside it: an alarm works in the main thread only, and Python cannot
end a thread that is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ortolan.runtime.text.template_budget import (
    Budget,
    check_bits,
    check_format,
    length_of,
    size_of,
)
from ortolan.runtime.text.template_filters import (
    TEMPLATE_FILTERS,
    ask_join,
    ask_replace,
    concat,
    concat_values,
)

STEP_FILTER = "ortolan_steps"
CONCAT_FILTER = "ortolan_concat"

_PADDING_METHODS = {"center", "expandtabs", "ljust", "rjust", "translate", "zfill"}


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, asking the budget. Nothing is computed when it compiles."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(optimized=False, finalize=_printed, **settings)
        self.filters = {
            **TEMPLATE_FILTERS,
            STEP_FILTER: _counted,
            CONCAT_FILTER: concat_values,
        }
        self.concat = concat  # type: ignore[method-assign]  # what the compiled code joins with
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
            check_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in the base class: a template may pass arguments of any name)
        """Calls are steps: macros can call themselves."""
        Budget.step()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            match __obj.__name__, args:
                case "join", (parts,):
                    args = (ask_join(text, parts),)
                case "replace", (str() as old, str() as new, *_):
                    ask_replace(text, old, new)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that make large values out of small ones."""
        match operator, left, right:
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                Budget.build(length_of(left) + length_of(right))
            case "*", (str() | list() | tuple()), int():
                Budget.build(length_of(left) * right)
            case "*", int(), (str() | list() | tuple()):
                Budget.build(left * length_of(right))
            case "*", int(), int():
                check_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                check_bits(left.bit_length() * abs(right))
            case "%", str(), _:
                check_format(left)
                Budget.build(len(left) + size_of(right))
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
    Budget.build(size_of(value))
    return value
