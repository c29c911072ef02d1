"""A checkpoint's settings, read by name; what nobody has read is refused at the end.

A setting that is passed over in silence makes a model that runs and computes something else.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from ortolan.errors import CheckpointError, ConfigError

# Every number ends up in float32, and so must the products of some of them.
_SMALLEST, _LARGEST = 1e-18, 1e18


class Settings:
    """The values of one object of a config, and which of them were read.

    where: the file, for messages. prefix: the path of this object within it, ending with a dot.
    """

    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self.prefix = prefix
        self._values = values
        self._read: set[str] = set()
        self._nested: list[Settings] = []

    def get(self, key: str) -> Any:
        """The value, or None; counts as read. A JSON null is the same as an absent key."""
        self._read.add(key)
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there, a null included; does not count as read."""
        return key in self._values

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 that float32 holds well, so neither above 1e18 nor below 1e-18.

        Raises CheckpointError without one and without a default.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            if _SMALLEST <= value <= _LARGEST:
                return value
            if value > 0:
                limits = f"a number from {_SMALLEST:g} to {_LARGEST:g}"
                raise self.unfit(key, value, limits)
        raise self.unfit(key, value, "a number above 0")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise self.unfit(key, value, "a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.unfit(key, value, "true or false")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of `count` numbers as `number` takes them."""
        value = self.get(key)
        if isinstance(value, list) and len(value) == count:
            items = {str(i): item for i, item in enumerate(value)}
            read = Settings(self.where, items, f"{self.prefix}{key}.")
            return [float(read.number(str(i))) for i in range(count)]
        raise self.unfit(key, value, f"a list of {count} numbers")

    def nested(self, key: str) -> Settings | None:
        """An object within this one; `finish` looks into it too."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.unfit(key, value, "an object")
        inner = Settings(self.where, value, f"{self.prefix}{key}.")
        self._nested.append(inner)
        return inner

    def expect(self, key: str, *accepted: object) -> None:
        """Refuse any value but these, by name; an absent one is accepted."""
        value = self.get(key)
        if value is not None and value not in accepted:
            raise self.unsupported(key, value)

    def ignore(self, *keys: str) -> None:
        """Settings that change nothing about the model's results."""
        self._read.update(keys)

    def finish(self) -> None:
        """Raises ConfigError naming the first setting that nobody has read."""
        for key, value in self._values.items():
            if key not in self._read and value is not None:
                raise self.unsupported(key, value)
        for inner in self._nested:
            inner.finish()

    def unsupported(self, key: str, value: object) -> ConfigError:
        """The error for a value that we cannot express."""
        return ConfigError(
            f"{self.where}: setting {self.prefix}{key} = {reprlib.repr(value)} is not supported; "
            "ignoring it would change the model"
        )

    def unfit(self, key: str, value: object, expected: str) -> CheckpointError:
        """The error for a value that makes no sense."""
        found = "missing" if value is None else reprlib.repr(value)
        return CheckpointError(
            f"{self.where}: setting {self.prefix}{key} is {found}, expected {expected}"
        )
