"""The systemd unit."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ortolan.errors import UsageError
from ortolan.runtime.serve.config import ENVIRONMENT_PREFIX, TYPES, ServeConfig


class _Unit(configparser.RawConfigParser):
    """A unit file, in which names may come twice; the last counts here."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, delimiters="=", comment_prefixes="#", interpolation=None)
        self.read(path, encoding="utf-8")

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def unit_file(root: Path) -> Path:
    return root / "deploy" / "ortolan.service"


def test_unit_waits_for_running_requests_and_not_for_wrong_settings(unit_file: Path) -> None:
    """systemd kills what outlasts its patience: answers would be cut that had time left."""
    service = _Unit(unit_file)["Service"]
    defaults = ServeConfig()
    assert float(service["TimeoutStopSec"]) > defaults.drain_delay + defaults.grace
    assert service["Restart"] == "on-failure"
    assert int(service["RestartPreventExitStatus"]) == UsageError.exit_status
    assert service["DynamicUser"] == "yes"
    assert service["ProtectSystem"] == "strict"
    for variable in re.findall(r"\b([A-Z_]+)=", service["Environment"]):
        assert variable.removeprefix(ENVIRONMENT_PREFIX).lower() in TYPES


def test_systemd_accepts_the_unit(unit_file: Path, tmp_path: Path) -> None:
    """A name that systemd does not know is skipped in silence, a hardening as well."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed; it comes with systemd")
    # The program need not be installed here for its unit to be right.
    text = unit_file.read_text(encoding="utf-8").replace("=/opt/ortolan/bin/ortolan", "=/bin/true")
    copy = tmp_path / unit_file.name
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if unit_file.name in line]
    assert (done.returncode, complaints) == (0, []), done.stderr
