"""`ortolan export`: what is handed to the exporter, and what is said when it is done."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ortolan.export import exporter
from ortolan.export.precision import DEFAULT_BLOCK_SIZE, Quantization
from ortolan.graphs.manifest import Manifest

NO_REPORT: dict[str, Any] = {"accuracy_reports": [], "no_report": None}

Run = Callable[..., Result]
RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path) -> list[tuple[Any, ...]]:
    """Stands in for the exporter of float weights; holds what it was called with."""
    calls: list[tuple[Any, ...]] = []
    manifest = dataclasses.replace(Manifest.read(tiny_bundle), weights=[])

    def export(source: str, target: Path, options: Any, progress: Any) -> Manifest:
        calls.append((source, target, options, progress))
        return manifest

    monkeypatch.setattr(exporter, "export_bundle", export)
    return calls


def test_last_line_says_what_to_type_next(run: Run, exported: list[tuple[Any, ...]]) -> None:
    """The next command is there to be copied, quoted where the shell needs it."""
    done = run("export", "model.gguf", "my bundle")
    assert done.exit_code == 0
    pattern = r"my bundle: 1\.0 KB in \d+\.\d s; next: ortolan generate 'my bundle' \"\.\.\.\"\n"
    assert re.fullmatch(pattern, done.stdout)
    assert done.stderr == ""


def test_next_command_works_for_a_name_that_looks_like_an_option(
    run: Run, exported: list[tuple[Any, ...]]
) -> None:
    """`ortolan export model.gguf -- -bundle` is allowed, so the next command must be too."""
    done = run("export", "--", "model.gguf", "-bundle")
    assert 'next: ortolan generate -- -bundle "..."' in done.stdout


def test_options_left_out_are_the_fields_defaults(
    run: Run, exported: list[tuple[Any, ...]]
) -> None:
    """A default written twice would drift; no terminal is here, so no progress is asked for."""
    run("export", "model.gguf", "bundle")
    run("export", "x", "y", "--weights", "float32", "--max-context", "64", "--force")
    assert exported == [
        ("model.gguf", Path("bundle"), exporter.ExportOptions(), None),
        ("x", Path("y"), exporter.ExportOptions("float32", max_context=64, force=True), None),
    ]


def test_help_states_the_fields_defaults(run: Run) -> None:
    """The help cannot read them, since it must work without the exporter's packages."""
    defaults = {item.name: item.default for item in dataclasses.fields(exporter.ExportOptions)}
    assert defaults == {
        "weights": "source",
        "prefill_weights": None,
        "decode_weights": None,
        "calibration": None,
        "preset": "",
        "max_context": None,
        "force": False,
        "attention": "gqa",
        "kv": "float",
        "dtype": "float32",
        "quantization": Quantization(),
    }
    assert (DEFAULT_BLOCK_SIZE, Quantization().symmetric) == (32, None)
    said = " ".join(run("export", "--help").stdout.split())
    assert "[default: source]" in said
    assert "[default: the checkpoint's]" in said
    assert "[default: 32]" in said
    assert "[default: symmetric]" in said


def test_json_tells_size_and_time(run: Run, exported: list[tuple[Any, ...]]) -> None:
    """Build scripts read this instead of the sentence."""
    found = json.loads(run("export", "model.gguf", "bundle", "--json").stdout)
    assert found.pop("seconds") >= 0
    assert found == {"bundle": "bundle", "source": "tiny.gguf", "bytes": 1011, **NO_REPORT}


def test_missing_source_is_named(run: Run, tmp_path: Path) -> None:
    """The sentence says what may be given instead, and nothing is made."""
    done = run("export", tmp_path / "no.gguf", tmp_path / "bundle")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'no.gguf'}: ")
    assert "smollm2" in done.stderr
    assert not (tmp_path / "bundle").exists()


def test_existing_bundle_needs_force(run: Run, smollm2_gguf: Path, tiny_bundle: Path) -> None:
    """Somebody's bundle must not vanish by a repeated command."""
    done = run("export", smollm2_gguf, tiny_bundle)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 1
    assert "--force" in done.stderr
    assert (tiny_bundle / "decode.onnx").read_bytes() == b"not a graph"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals cannot be sent to a process there")
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_export_leaves_nothing(
    smollm2_gguf: Path, tmp_path: Path, sent: int, status: int
) -> None:
    """A build that is stopped, by hand or by a supervisor, must not fill the disk with halves."""
    home = tmp_path / "home"
    home.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ortolan", "export", smollm2_gguf, home / "bundle"],
        stderr=subprocess.PIPE,
        # A test run in the background hands down an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not any(home.iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert b"Traceback" not in err
    assert list(home.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("no_color", [False, True])
def test_progress_shows_on_a_terminal_only_without_no_color(
    smollm2_gguf: Path, tmp_path: Path, no_color: bool
) -> None:
    """A log file full of bars helps nobody; neither does a terminal silent for ten seconds."""
    side, other = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "ortolan",
            "export",
            smollm2_gguf,
            tmp_path / "bundle",
            "--no-report",
        ],
        stdout=subprocess.DEVNULL,
        stderr=other,
        env={**environment, "TERM": "xterm", **({"NO_COLOR": "1"} if no_color else {})},
    )
    os.close(other)
    shown = b""
    try:
        while piece := os.read(side, 4096):
            shown += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(side)
    assert process.wait(timeout=60) == 0
    if no_color:
        # One line that says why there is no report; no bar, and nothing that moves the cursor.
        assert shown.count(b"\n") == 1
        assert b"\x1b" not in shown
    else:
        assert b"100%" in shown
        assert b"model.layers" in shown


def test_calibration_has_a_text_of_its_own_or_the_shipped_one(
    run: Run, exported: list[tuple[Any, ...]]
) -> None:
    """The option stands alone, or has a file; a budget goes beside it."""
    words = ("export", "x", "y", "--weights", "int4")
    run(*words, "--calibrate")
    run(*words, "--calibrate=mine.txt", "--bits-per-weight", "4.5")
    assert [(call[2].calibration, call[2].quantization) for call in exported] == [
        (None, Quantization(calibrate=True)),
        (Path("mine.txt"), Quantization(calibrate=True, bits_per_weight=4.5)),
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--calibrate=none.txt",), "--calibrate none.txt: cannot be read"),
        (("--calibrate=none.txt", "--weights", "source"), "--calibrate has no effect"),
        (("--bits-per-weight", "5"), "add --calibrate"),
        (("--calibrate", "--bits-per-weight", "3"), "--bits-per-weight 3 is not possible"),
    ],
)
def test_calibrations_that_cannot_be_are_one_sentence(
    run: Run, tmp_path: Path, tiny_gguf: Path, more: tuple[str, ...], said: str
) -> None:
    """A misspelt file must not be an hour's work for nothing."""
    target = tmp_path / "bundle"
    done = run("export", str(tiny_gguf), str(target), "--weights", "int8", *more)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not target.exists()
