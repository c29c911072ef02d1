"""Every example, run as its reader would, against the demo model."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("starlette")

from serve_process import Served

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
KEPT = ROOT / "build" / "examples"  # environments, kept between runs
INSTALL_S = 300


@pytest.fixture(scope="module")
def addresses(
    smollm2_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """A served demo model: its name, and host:port of both servers."""
    folder = tmp_path_factory.mktemp("served")
    with Served(smollm2_bundle, folder, "--model-name", "demo") as server:
        yield server.addresses
        assert server.stop() == 0, server.said


def run(command: Sequence[str | Path]) -> str:
    """What it prints; it must end well."""
    done = subprocess.run(
        command, cwd=EXAMPLES, capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(name: str, marker: str, commands: Sequence[Sequence[str | Path]]) -> None:
    """Runs commands once for `marker`; skips the test if they fail, as without a network."""
    stamp = KEPT / f"{name}.installed"
    if stamp.exists() and stamp.read_text() == marker:
        return
    for command in commands:
        try:
            done = subprocess.run(
                command, cwd=KEPT, capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{name} was not installed within {INSTALL_S} s")
        if done.returncode != 0:
            pytest.skip(f"{name} cannot be installed here: {done.stderr.strip()[-300:]}")
    stamp.write_text(marker)


def python_with(requirement: str) -> Path:
    """A Python that has one package and what that needs, and nothing of ours."""
    KEPT.mkdir(parents=True, exist_ok=True)
    name = requirement.partition("[")[0]
    python = KEPT / name / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    install(
        name,
        f"{requirement} {sys.version}",
        [[sys.executable, "-m", "venv", "--clear", KEPT / name], [*pip, requirement]],
    )
    return python


@pytest.fixture(scope="module")
def node() -> Path:
    """A copy of the examples for Node, with what they need."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = KEPT / "node"
    shutil.copytree(EXAMPLES / "node", folder, dirs_exist_ok=True)
    npm = ["npm", "install", "--prefix", folder, "--no-audit", "--no-fund", "--ignore-scripts"]
    install("node-modules", (folder / "package.json").read_text(), [npm])
    return folder


def check(said: str) -> None:
    """The answer, and the usage that came with it."""
    answer, tokens = said.strip().rsplit("\n", 1)
    assert "Paris" in answer
    assert tokens.endswith(" tokens")


def test_every_example_is_told_of_and_run() -> None:
    """An example that no test runs is wrong after the next change."""
    kinds = {".py", ".sh", ".mjs"}
    found = {file.name for file in EXAMPLES.rglob("*") if file.suffix in kinds}
    readme, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert len(found) == 8
    for name in found:
        assert f"{name})" in readme, name
        assert f'"{name}"' in tests, name


@pytest.mark.slow
def test_curl(addresses: dict[str, Any]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    events = run(["sh", EXAMPLES / "curl.sh", f"http://{addresses['http']}"]).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    read = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    answer = "".join(one["choices"][0]["delta"]["content"] for one in read[:-1])
    assert "Paris" in answer
    assert read[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["client.py", "grpc_stubs.py"])
def test_python_over_grpc(addresses: dict[str, Any], name: str) -> None:
    check(run([sys.executable, "-P", EXAMPLES / name, addresses["grpc"]]))


@pytest.mark.slow
def test_openai_in_python(addresses: dict[str, Any]) -> None:
    pytest.importorskip("openai")
    url = f"http://{addresses['http']}"
    check(run([sys.executable, "-P", EXAMPLES / "openai_chat.py", url]))


@pytest.mark.slow
def test_langchain(addresses: dict[str, Any]) -> None:
    python = python_with("langchain-openai")
    check(run([python, EXAMPLES / "langchain_chat.py", f"http://{addresses['http']}"]))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ortolan.proto.inference") is None,
    reason="this server does not speak KServe's protocol",
)
def test_triton(addresses: dict[str, Any]) -> None:
    python = python_with("tritonclient[grpc]")
    name = "triton_stream.py"
    assert "Paris" in run([python, EXAMPLES / name, addresses["grpc"], addresses["model"]])


@pytest.mark.slow
def test_openai_in_node(addresses: dict[str, Any], node: Path) -> None:
    check(run(["node", node / "openai_chat.mjs", f"http://{addresses['http']}"]))


@pytest.mark.slow
def test_grpc_in_node_from_the_proto(addresses: dict[str, Any], node: Path) -> None:
    proto = ROOT / "proto" / "ortolan" / "v1" / "ortolan.proto"
    check(run(["node", node / "grpc_chat.mjs", addresses["grpc"], proto]))
