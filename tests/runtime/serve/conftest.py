"""What tests of the servers share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """The file of `keyed.KEYS`."""
    from keyed import KEYS

    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return file
