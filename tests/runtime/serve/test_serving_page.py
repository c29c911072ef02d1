"""docs/serving.md names every setting of the server, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="the extra serve is not installed")

from ortolan.runtime.serve.config import DEFAULTS

ROW = re.compile(r"^\| (`--[^|]+) \| ([^|]+) \|", re.MULTILINE)


@pytest.fixture(scope="module")
def documented(root: Path) -> dict[str, str]:
    """Name of a setting -> its default as the page has it."""
    page = (root / "docs/serving.md").read_text(encoding="utf-8")
    page = page[page.index("## Settings") : page.index("## From start to end")]
    found = {}
    for options, defaults in ROW.findall(page):
        names = re.findall(r"`--([\w-]+)`", options)
        shown = defaults.split(", ")
        shown = shown if len(shown) == len(names) else [defaults] * len(names)
        found |= {name.replace("-", "_"): text for name, text in zip(names, shown, strict=True)}
    return found


def test_every_setting_is_on_the_page_and_nothing_else(documented: dict[str, str]) -> None:
    assert sorted(documented) == sorted(DEFAULTS)


def test_defaults_on_the_page_are_the_defaults(documented: dict[str, str]) -> None:
    """An operator who plans by the page must not find another number."""
    for name, default in DEFAULTS.items():
        if default is None or default == {}:
            assert not re.fullmatch(r"[\d.]+", documented[name].strip()), name
        elif isinstance(default, int | float) and not isinstance(default, bool):
            assert float(documented[name]) == default, name
        else:
            assert documented[name].strip() == str(default), name
