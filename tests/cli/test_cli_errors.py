"""Whatever goes wrong: one sentence, the right exit status, no traceback."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import ortolan.cli
from ortolan.errors import BundleError

Run = Callable[..., Result]
RunCli = Callable[..., subprocess.CompletedProcess[str]]
RunFake = Callable[..., "subprocess.Popen[bytes]"]


def assert_one_sentence(done: Result, status: int, *parts: str) -> None:
    assert done.exit_code == status, done.output
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in done.output


USAGE = [
    (["--nonsense"], "--nonsense"),
    (["genrate"], "generate"),
    (["generate"], "BUNDLE"),
    (["generate", "b"], "PROMPT"),
    (["generate", "b", "x", "y"], "y"),
    (["generate", "b", ""], "PROMPT is empty"),
    (["generate", "b", "x", "--system", "s"], "--chat"),
    (["generate", "b", "x", "--max-tokens", "-1"], "--max-tokens is -1"),
    (["generate", "b", "x", "--max-tokens", "many"], "--max-tokens"),
    (["generate", "b", "x", "--temperature", "-1"], "--temperature is -1"),
    (["generate", "b", "x", "--temperature", "nan"], "--temperature"),
    (["generate", "b", "x", "--top-k", "-2"], "--top-k"),
    (["generate", "b", "x", "--top-p", "0"], "--top-p"),
    (["generate", "b", "x", "--min-p", "2"], "--min-p"),
    (["generate", "b", "x", "--repetition-penalty", "0"], "--repetition-penalty"),
    (["generate", "b", "x", "--presence-penalty", "3"], "--presence-penalty"),
    (["generate", "b", "x", "--frequency-penalty", "-3"], "--frequency-penalty"),
    (["generate", "b", "x", "--stop", ""], "--stop"),
    (["generate", "b", "x", "--seed", str(2**64)], "--seed"),
    (["generate", "b", "x", "--logit-bias", "five"], "42=-5"),
    (["generate", "b", "x", "--logit-bias", "5=much"], "42=-5"),
    (["generate", "b", "x", "--logit-bias", "5=nan"], "--logit-bias of 5"),
    (["generate", "b", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"], "twice"),
    (["generate", "b", "x", "--logit-bias=-5=1"], "--logit-bias is -5"),
    (["generate", "b", "x", "--threads", "0"], "--threads"),
    (["generate", "b", "x", "--threads", "99999999"], "1024"),
    (["generate", "b", "x", "--max-context", "0"], "--max-context"),
    (["generate", "b", "x", "--accuracy", "perfect"], "exact"),
    (["chat", "b", "--top-p", "7"], "--top-p"),
    (["inspect", "b", "--threads", "x"], "--threads"),
    (["export", "s"], "BUNDLE"),
    (["export", "s", "b", "--weights", "int3"], "float32"),
    (["export", "s", "b", "--max-context", "1"], "--max-context"),
]


@pytest.mark.parametrize(("args", "part"), USAGE, ids=[" ".join(args)[:60] for args, _ in USAGE])
def test_wrong_command_line_is_a_usage_error(
    run: Run, fake: Any, args: list[str], part: str
) -> None:
    """Scripts tell status 2, a mistake in the command, from 1, a failure while running."""
    assert_one_sentence(run(*args), 2, part)
    assert fake.loaded is None


COMMANDS = [
    ["generate", "{}", "hello"],
    ["chat", "{}"],
    ["inspect", "{}"],
    ["inspect", "{}", "--json"],
    ["verify", "{}"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_bundle_that_cannot_be_opened(run: Run, tmp_path: Path, command: list[str]) -> None:
    """The commonest mistake is the path; each command names it and what makes a bundle."""
    file = tmp_path / "file"
    file.touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "manifest.json").write_text(json.dumps({"schema_version": "9.0"}))
    for folder, part in (
        (tmp_path / "missing", "ortolan export"),
        (file, "ortolan export"),
        (empty, "manifest.json"),
        (newer, "update Ortolan"),
    ):
        done = run(*(part.format(folder) for part in command))
        assert_one_sentence(done, 1, str(folder), part)
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "status", "parts"),
    [
        (["--provider", "cppu"], 1, ["'cppu'", "did you mean cpu?"]),
        (["--logit-bias", "49152=1"], 2, ["--logit-bias holds", "49152", "49151"]),
        (["--top-k", "50000"], 2, ["--top-k is 50000"]),
        (["--max-context", "9999999"], 2, ["--max-context is 9999999"]),
    ],
    ids=["provider", "logit-bias", "top-k", "max-context"],
)
def test_option_that_only_the_runtime_can_judge(
    run_cli: RunCli, smollm2_bundle: Path, options: list[str], status: int, parts: list[str]
) -> None:
    """What needs the model or the machine to be refused is refused as shortly."""
    done = run_cli("generate", smollm2_bundle, "x", *options, check=False)
    assert done.returncode == status
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def test_standard_input_that_is_not_utf8(run: Run, fake: Any) -> None:
    """A file in another encoding must not reach the model as garbage."""
    done = run("generate", "bundle", "-", stdin=b"caf\xe9")
    assert_one_sentence(done, 1, "not UTF-8 at byte 3")
    assert fake.asked == []


def test_argument_that_is_not_utf8(run: Run, fake: Any) -> None:
    """Python hides foreign bytes in lone surrogates, which no tokenizer takes."""
    assert_one_sentence(run("generate", "bundle", "caf\udce9"), 1, "PROMPT is not UTF-8")


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "b", "x", "--stop", "\udce9"],
        ["generate", "b", "x", "--chat", "--system", "\udce9"],
        ["chat", "b", "--system", "\udce9"],
    ],
    ids=" ".join,
)
def test_option_that_is_not_utf8(run: Run, fake: Any, args: list[str]) -> None:
    """The option is named; the tokenizer would speak of a surrogate in the prompt."""
    assert_one_sentence(run(*args), 1, f"{args[-2]} is not UTF-8")


def test_error_cannot_steer_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template's words are anyone's; they must not clear the screen or hide what was said."""
    monkeypatch.setattr("ortolan.load", failing(BundleError("a\x1b[2Jb\x9bc\u202ed é")))
    done = run("generate", "bundle", "x")
    assert done.stderr == "error: a\\x1b[2Jb\\x9bc\\u202ed é\n"


def test_warnings_show_their_fields_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder and the reason are what a user can act on; once is enough."""

    def load(*args: Any, **settings: Any) -> Any:
        for _ in range(2):
            logging.getLogger("ortolan.any").warning(
                "not written", extra={"folder": "f", "reason": "full"}
            )
        raise BundleError("end")

    monkeypatch.setattr("ortolan.load", load)
    for _ in range(2):
        done = run("generate", "bundle", "x")
        assert done.stderr == "warning: not written (folder f, reason full)\nerror: end\n"


@pytest.mark.skipif(sys.platform == "win32", reason="shell redirections")
@pytest.mark.parametrize(
    ("command", "status", "out", "err"),
    [
        ("generate b x >&-", 1, "", "error: standard output cannot be written"),
        ("--version >&-", 1, "", "error: standard output cannot be written"),
        ("generate b x 2>&-", 0, "wörd", ""),
        ("generate b '' 2>&-", 2, "", ""),
        ("generate b - <&-", 2, "", "error: PROMPT is empty"),
        ("chat b <&-", 0, "", ""),
        ("generate b x >/dev/full", 1, "", "error: standard output cannot be written"),
        ("--help >/dev/full", 1, "", "error: standard output cannot be written"),
        ("generate b x 2>/dev/full", 0, "wörd", ""),
        ("generate b '' 2>/dev/full", 2, "", ""),
    ],
)
def test_standard_stream_that_is_closed_or_full(
    command: str, status: int, out: str, err: str
) -> None:
    """A daemon's closed streams and a full disk are told in one sentence, where one can be."""
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    shell = f'"{sys.executable}" "{Path(__file__).with_name("fake_program.py")}" {command}'
    done = subprocess.run(shell, shell=True, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(out)
    assert bool(done.stdout) == bool(out)
    if "2>" not in command and out == "" and err:
        assert done.stderr.startswith(err)
        assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_interrupt_while_loading_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after Enter must not show where the imports were."""

    class Interrupting:
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "ortolan.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ortolan.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        ortolan.cli.main()
    assert ended.value.code == 130


def test_error_with_line_breaks_stays_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log reader and a terminal both take an error as one line."""
    monkeypatch.setattr("ortolan.load", failing(BundleError("first\n  second\n")))
    assert_one_sentence(run("generate", "bundle", "x"), 1, "error: first second")


@pytest.mark.parametrize("args", [["--debug", "generate"], ["generate", "--debug"]])
def test_debug_shows_the_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    """Wherever --debug stands, the report that it is asked for must hold the place."""
    monkeypatch.setattr("ortolan.load", failing(BundleError("broken")))
    done = run(*args, "bundle", "x")
    assert done.exit_code == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("error: broken\n")


def test_unexpected_exception_is_named_without_a_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user can report a name; a page of frames only frightens."""
    monkeypatch.setattr("ortolan.load", failing(ZeroDivisionError("by zero")))
    done = run("generate", "bundle", "x")
    assert_one_sentence(done, 1, "unexpected ZeroDivisionError (by zero)", "--debug")


def test_interrupt_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's loop stops on 130, and goes on after any other status."""
    monkeypatch.setattr("ortolan.load", failing(KeyboardInterrupt()))
    done = run("generate", "bundle", "x")
    assert done.exit_code == 130
    assert "Traceback" not in done.output


@pytest.mark.skipif(sys.platform == "win32", reason="signals cannot be sent to a process there")
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_ends_with_its_status(run_fake: RunFake, sent: int, status: int) -> None:
    """A supervisor's SIGTERM must unwind like Ctrl-C, so that nothing half-made is left."""
    process = run_fake("generate", "b", "x", env={"FAKE_PIECES": "1000", "FAKE_DELAY_S": "0.05"})
    assert process.stdout is not None
    assert process.stdout.read(3) == b"w\xc3\xb6"  # it is streaming
    process.send_signal(sent)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert b"Traceback" not in err


def test_reader_that_goes_away_is_no_error(run_fake: RunFake) -> None:
    """`ortolan generate ... | head -1` is a normal thing to type."""
    process = run_fake("generate", "b", "x", env={"FAKE_PIECES": "1000", "FAKE_DELAY_S": "0.01"})
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"w"
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert process.stderr.read() == b""


def test_no_command_shows_the_help(run: Run) -> None:
    """The first thing that people type is the name alone."""
    done = run()
    assert done.exit_code == 2
    assert "Commands:" in done.stderr


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises the error, whatever it is called with."""

    def fail(*args: Any, **settings: Any) -> Any:
        raise error

    return fail
