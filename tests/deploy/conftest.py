"""Linters that only these tests need, each in an environment of its own under build/."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

Tool = Callable[[str], Path]


@pytest.fixture(scope="session")
def tool(root: Path) -> Tool:
    """`NAME==VERSION` of the package index -> the folder of its programs. Skips where it cannot
    be had.
    """

    def installed(requirement: str) -> Path:
        folder = root / "build" / "tools" / requirement.replace("==", "-")
        programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
        if not (folder / "installed").exists():
            venv.create(folder, with_pip=True)
            done = subprocess.run(
                [programs / "python", "-m", "pip", "install", "--quiet", requirement],
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            if done.returncode != 0:
                pytest.skip(f"{requirement} cannot be installed: {done.stderr[-300:]}")
            (folder / "installed").touch()
        return programs

    return installed
