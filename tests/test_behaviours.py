"""docs/behaviours.md names tests that exist, for every line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LINES = 19
NAMED = re.compile(r"^ +- `([\w/]+\.py)::(\w+)`$", re.MULTILINE)


@pytest.fixture(scope="module")
def lines(root: Path) -> dict[int, str]:
    """Number -> text of each behaviour, with its list."""
    text = (root / "docs/behaviours.md").read_text(encoding="utf-8")
    parts = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    return {int(number): body for number, body in zip(parts[::2], parts[1::2], strict=True)}


def functions_in(path: Path) -> set[str]:
    """Names of the test functions in a file."""
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def test_every_behaviour_names_tests_that_exist(lines: dict[int, str], root: Path) -> None:
    """A promise whose test was renamed away is a promise that nobody keeps."""
    missing = [
        f"{number}: {path}::{name}"
        for number, body in lines.items()
        for path, name in NAMED.findall(body)
        if name not in functions_in(root / "tests" / path)
    ]
    assert missing == []


def test_no_behaviour_is_without_a_test(lines: dict[int, str]) -> None:
    """The list is complete, and every line of it is held by something."""
    assert list(lines) == list(range(1, LINES + 1))
    assert [number for number, body in lines.items() if not NAMED.search(body)] == []


def test_every_named_place_is_read(lines: dict[int, str]) -> None:
    """A name that is written in another form would not be checked."""
    for number, body in lines.items():
        assert body.count(".py::") == len(NAMED.findall(body)), number
