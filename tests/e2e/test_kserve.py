"""KServe v2 as Triton's own client speaks it, from an environment of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from serve_process import Served

from ortolan.runtime.bundle import Bundle
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig, SamplingParams

pytestmark = pytest.mark.slow

# It wants protobuf below 7, and brings a copy of the messages that our server has.
PACKAGES = ("tritonclient[grpc]==2.73.0", "protobuf<7")

RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def triton_python(root: Path) -> Path:
    """A Python with tritonclient, kept between runs."""
    venv = root / "build" / "tritonclient-venv"
    python = venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    ready = venv / ".installed"
    if not ready.exists() or ready.read_text() != repr(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        options = ("--quiet", "--disable-pip-version-check")
        done = subprocess.run(
            [python, "-m", "pip", "install", *options, *PACKAGES],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"tritonclient cannot be installed: {done.stderr[-300:]}")
        ready.write_text(repr(PACKAGES))
    return python


@pytest.fixture(scope="module")
def address(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`ortolan serve` in a process of its own."""
    folder = tmp_path_factory.mktemp("kserve")
    options = ("--http-port", "off", "--model-name", "my-model")
    with Served(tiny_bundle, folder, *options) as server:
        yield server.grpc


@pytest.fixture(scope="module")
def found(triton_python: Path, address: str, root: Path) -> dict[str, Any]:
    """What tests/triton_calls.py saw."""
    said = _run(triton_python, root / "tests" / "triton_calls.py", address)
    return dict(json.loads(said))


def _run(python: Path, *args: Any) -> str:
    done = subprocess.run([python, *args], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> Any:
    """The library's answer to what the client asks."""
    with LLM(Bundle.open(tiny_bundle), EngineConfig(max_slots=2)) as llm:
        (answer,) = llm.generate("the red fox", SamplingParams(max_tokens=12, temperature=0))
        return answer


def test_tritonclient_gets_the_librarys_answer(found: dict[str, Any], expected: Any) -> None:
    """The same text, whichever way the settings come."""
    sync = found["sync"]
    assert sync["outputs"] == {
        "text_output": expected.text,
        "finish_reason": expected.finish_reason,
        "num_input_tokens": expected.usage.prompt_tokens,
        "num_output_tokens": expected.usage.completion_tokens,
    }
    assert sync["id"] == "5"
    assert sync["json"] == expected.text
    assert sync["tensors"] == "the red fox" + expected.text
    assert sync["asked outputs"] == ["text_output"]


def test_tritonclient_learns_what_is_served(found: dict[str, Any]) -> None:
    sync = found["sync"]
    assert sync["live"] is sync["ready"] is sync["model ready"] is True
    assert sync["server"] == "ortolan"
    assert {"text_input", "stream", "sampling_parameters"} <= set(sync["inputs"])


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("unknown model", "NOT_FOUND", "'other'"),
        ("unknown ready", "NOT_FOUND", "'other'"),
        ("unknown version", "NOT_FOUND", "'9'"),
        ("unknown input", "INVALID_ARGUMENT", "'nothing'"),
        ("bad setting", "INVALID_ARGUMENT", "top_p is 7"),
    ],
)
def test_tritonclient_is_told_what_is_wrong(
    found: dict[str, Any], what: str, code: str, said: str
) -> None:
    status, message = found["sync"][what]
    assert status == f"StatusCode.{code}"
    assert said in message


def test_tritonclient_streams_several_requests(found: dict[str, Any], expected: Any) -> None:
    """An error of one of them is its own."""
    stream = found["stream"]
    assert "".join(stream["texts"]["1"]) == expected.text
    assert len(stream["texts"]["1"]) > 1
    assert stream["texts"]["3"] == [expected.text]
    assert stream["final"]["1"][-1] is True
    assert not any(stream["final"]["1"][:-1])
    (error,) = stream["errors"]
    assert "top_p is 7" in error


def test_tritonclient_streams_with_asyncio(found: dict[str, Any], expected: Any) -> None:
    assert found["asyncio"]["ready"] is True
    assert found["asyncio"]["whole"] == expected.text
    assert found["asyncio"]["streamed"] == {str(index): expected.text for index in range(3)}


def test_stream_that_tritonclient_cancels_leaves_nothing(
    found: dict[str, Any], address: str, run_cli: RunCli
) -> None:
    """llama.cpp#24496: an answer nobody waits for must not hold a slot."""
    assert found["cancel"] == "StatusCode.CANCELLED"
    deadline = time.monotonic() + 10
    while True:
        stats = json.loads(run_cli("client", "stats", "--address", address, "--json").stdout)
        if stats["running"] == 0 or time.monotonic() > deadline:
            break
    assert (stats["running"], stats["waiting"]) == (0, 0)


def test_pages_example_runs(triton_python: Path, address: str, root: Path, tmp_path: Path) -> None:
    """An example that does not run costs every reader an hour."""
    page = (root / "docs" / "kserve.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "127.0.0.1:50051" in example
    script = tmp_path / "example.py"
    script.write_text(example.replace("127.0.0.1:50051", address), encoding="utf-8")
    said = _run(triton_python, script)
    whole, _, rest = said.partition("length 24\n")
    assert whole.strip()
    assert rest.strip() == whole.strip()


def test_our_client_and_tritons_messages_fit_one_process() -> None:
    """The messages cannot be loaded twice in a process, so our client does not load them."""
    code = (
        "import sys, ortolan.client.sync, ortolan.client.aio\n"
        "print('ortolan.proto.inference' in sys.modules)"
    )
    assert _run(Path(sys.executable), "-P", "-c", code).strip() == "False"
