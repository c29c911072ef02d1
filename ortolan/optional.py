"""Packages that only some installs have: imported where they are first needed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from ortolan.errors import MissingDependencyError


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """The imported module, for code that needs an optional package.

    `extra` is the name in pyproject.toml that brings the package; `purpose` begins the message
    ("running a model"). Raises MissingDependencyError if the package is not installed. An
    installed package that fails inside its own import raises its own error.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        package = module.partition(".")[0]
        raise MissingDependencyError(package, extra, purpose) from None
