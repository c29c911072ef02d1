"""Running a template that came with a model: Hugging Face's conventions, Jinja's sandbox, limits.

The template may be anyone's. Jinja's immutable sandbox gives it no private attributes, no
mutation and ranges of at most 100,000. Here its loops take at most MAX_LOOP_STEPS steps together
and its output has at most MAX_OUTPUT_CHARS. What it may build in variables is not bounded, so
templates are taken from bundles and never from requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ortolan.errors import TemplateError

MAX_LOOP_STEPS = 1_000_000
MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_ERROR_CHARS = 400  # an error does not echo a long message back

STEP_FILTER = "ortolan_steps"
# The variable that holds a run's step counter: no template can spell a name with a space.
STEP_COUNTER = "loop steps"


class SandboxedTemplate:
    """A compiled template. Raises TemplateError if `source` is not one."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.filters[STEP_FILTER] = _count_steps
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = nodes.Filter(
                    loop.iter, STEP_FILTER, [], [], None, None, lineno=loop.lineno
                )
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"chat_template.jinja is no valid template (line {error.lineno}: "
                f"{_short(error.message or '')}); correct it or use a plain prompt"
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's output.

        Raises TemplateError: with the template's own words if it calls raise_exception, and if
        it fails or runs past a limit.
        """
        pieces, size = [], 0
        try:
            for piece in self._template.generate({**variables, STEP_COUNTER: _step_counter()}):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise _PastLimitError(f"it wrote more than {MAX_OUTPUT_CHARS} characters")
        except _RefusedError as error:
            raise TemplateError(
                f"the chat template refused the messages: {_short(str(error))}"
            ) from error
        except Exception as error:  # anything can fail in someone else's template
            reason = _short(str(error)).rstrip(".") or type(error).__name__
            raise TemplateError(
                f"the chat template failed ({reason}); change the messages or use a plain prompt"
            ) from error
        return "".join(pieces)


class _RefusedError(Exception):
    """A template called raise_exception."""


class _PastLimitError(Exception):
    """A template ran too long or wrote too much."""


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (declared so in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@jinja2.pass_context
def _count_steps(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    counted: Iterator[Any] = context[STEP_COUNTER](items)
    return counted


def _step_counter() -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Passes iterables on, which together may take MAX_LOOP_STEPS steps."""
    steps = 0

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        nonlocal steps
        for item in items:
            steps += 1
            if steps > MAX_LOOP_STEPS:
                raise _PastLimitError(f"its loops took more than {MAX_LOOP_STEPS} steps")
            yield item

    return counted


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + " ..."
