"""Running a template that came with a model: Hugging Face's conventions, Jinja's sandbox, limits.

The template may be anyone's. Jinja's immutable sandbox gives it no private attributes, no
mutation and ranges of at most 100,000. Here its loops and calls take at most MAX_LOOP_STEPS steps
together, its source and its output have at most MAX_SOURCE_CHARS and MAX_OUTPUT_CHARS, and what
it builds on the way is bounded by `template_limits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from ortolan.errors import TemplateError
from ortolan.runtime.text.template_budget import Budget, PastLimitError
from ortolan.runtime.text.template_limits import BoundedSandbox

MAX_LOOP_STEPS = 1_000_000
MAX_SOURCE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_ERROR_CHARS = 400  # an error does not echo a long message back


class SandboxedTemplate:
    """A compiled template. Raises TemplateError if `source` is not one."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"chat_template.jinja has {len(source)} characters, more than the "
                f"{MAX_SOURCE_CHARS} that are run; shorten it or use a plain prompt"
            )
        environment = BoundedSandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(environment.bounded(source))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"chat_template.jinja is no valid template (line {error.lineno}: "
                f"{_short(error.message or '')}); correct it or use a plain prompt"
            ) from error
        except Exception as error:  # what Python says of code nested too deeply has many types
            raise TemplateError(
                f"chat_template.jinja cannot be compiled ({_reason(error)}); "
                "correct it or use a plain prompt"
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's output.

        Raises TemplateError: with the template's own words if it calls raise_exception, and if
        it fails or runs past a limit.
        """
        pieces, size = [], 0
        try:
            with Budget(MAX_LOOP_STEPS):
                for piece in self._template.generate(variables):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_OUTPUT_CHARS:
                        raise PastLimitError(f"it wrote more than {MAX_OUTPUT_CHARS} characters")
        except _RefusedError as error:
            raise TemplateError(
                f"the chat template refused the messages: {_short(str(error))}"
            ) from error
        except Exception as error:  # anything can fail in someone else's template
            raise TemplateError(
                f"the chat template failed ({_reason(error)}); "
                "change the messages or use a plain prompt"
            ) from error
        return "".join(pieces)


class _RefusedError(Exception):
    """A template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (declared so in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _reason(error: Exception) -> str:
    return _short(str(error)).rstrip(".") or type(error).__name__


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + " ..."
