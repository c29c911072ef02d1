"""Every benchmark can at least be started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_script_can_be_imported(root: Path) -> None:
    """They are run rarely, and what they lean on changes: that must not be found out later."""
    folder = root / "benchmarks"
    # The children run in the peers' own environments.
    names = sorted(file.stem for file in folder.glob("*.py") if not file.stem.endswith("_child"))
    assert "run_all" in names
    code = "import " + ", ".join(names)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
