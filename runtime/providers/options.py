"""Options of execution providers: their names, and values checked before a model is loaded.

ONNX Runtime itself passes over many a wrong name or value without a word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ortolan.errors import UsageError

Kind = Literal["flag", "whole", "bytes", "text"]

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_FLAGS = {"1": "1", "0": "0", "true": "1", "false": "0", "on": "1", "off": "0"}
_EXPECTED: dict[Kind, str] = {
    "flag": "0 or 1",
    "whole": "a whole number of at least 0",
    "bytes": "a number of bytes, such as 8589934592 or 8GiB",
    "text": "text",
}


@dataclass(frozen=True)
class Option:
    """An option of a provider.

    choices: the values that a text may have; pattern: their form, which `says` puts into words.
    """

    kind: Kind = "text"
    choices: tuple[str, ...] = ()
    pattern: str = ""
    says: str = ""

    def checked(self, value: str) -> str | None:
        """The value as ONNX Runtime reads it, or None if it is no value of this option."""
        if self.kind == "flag":
            return _FLAGS.get(value.lower())
        if self.kind == "whole":
            return value if re.fullmatch(r"[0-9]{1,19}", value) else None
        if self.kind == "bytes":
            found = re.fullmatch(r"([0-9]{1,19}) ?(|KiB|MiB|GiB)", value)
            return str(int(found[1]) * _UNITS[found[2]]) if found else None
        if self.choices:
            near = {choice.lower(): choice for choice in self.choices}
            return near.get(value.lower())
        return value if re.fullmatch(self.pattern or ".+", value) else None

    @property
    def expected(self) -> str:
        """What a value must be, for people."""
        return self.says or " or ".join(self.choices) or _EXPECTED[self.kind]


def checked_options(
    provider: str, known: Mapping[str, Option], given: Mapping[str, Any]
) -> dict[str, str]:
    """The given options, spelled and valued as ONNX Runtime takes them.

    Raises UsageError that names the option.
    """
    checked = {}
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"provider {provider} has no option {name!r}; {_hint(name, known)}")
        text = str(int(value)) if isinstance(value, bool) else str(value)
        found = known[name].checked(text)
        if found is None:
            raise UsageError(
                f"option {name} of provider {provider} is {text!r}; it must be "
                f"{known[name].expected}"
            )
        checked[name] = found
    return checked


def _hint(name: str, known: Mapping[str, Option]) -> str:
    if not known:
        return "it takes none"
    near = difflib.get_close_matches(name.lower(), {key.lower(): key for key in known}, n=1)
    if near:
        return f"did you mean {next(key for key in known if key.lower() == near[0])}?"
    return f"it takes {', '.join(known)}"


def option_from_text(text: str, where: str) -> tuple[str, str]:
    """Name and value from `KEY=VALUE`. Raises UsageError that begins with `where`."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (equals and name and value):
        raise UsageError(f"{where} is {text!r}; it must be KEY=VALUE, such as device_id=1")
    return name, value


def options_from_text(text: str, where: str) -> dict[str, str]:
    """The same of several, parted by semicolons, as a variable of the environment holds them."""
    parts = (part.strip() for part in text.split(";"))
    return dict(option_from_text(part, where) for part in parts if part)
