"""Fixtures of more than one file here."""

from __future__ import annotations

from pathlib import Path

import pytest
from publishing import write_bundle


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder that holds one old bundle."""
    target = tmp_path / "bundle"
    target.mkdir()
    write_bundle(target, "old")
    return target
