"""`ortolan chat`: the conversation grows, ends and survives what a person does to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ortolan.cli.answer import follow

Run = Callable[..., Result]
RunFake = Callable[..., "subprocess.Popen[bytes]"]
RunCli = Callable[..., subprocess.CompletedProcess[str]]


def said(*contents: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def test_conversation_grows_with_the_answers(run: Run, fake: Any) -> None:
    """A model that is not shown its own answers cannot be asked about them."""
    done = run("chat", "bundle", stdin="one\n\ntwo\n")
    assert done.exit_code == 0
    assert done.stdout == "Hello wörld 🐦\nHello wörld 🐦\n"
    assert fake.asked == [said("one"), said("one", "Hello wörld 🐦", "two")]
    assert fake.closed


def test_timings_follow_each_answer_on_stderr(run: Run, fake: Any) -> None:
    """Cached tokens show that a long conversation is not read anew each time."""
    lines = run("chat", "bundle", stdin="one\ntwo\n").stderr.splitlines()
    assert len(lines) == 2
    assert all("5 tokens read (3 cached)" in line and "tokens/s" in line for line in lines)


def test_clear_forgets_all_but_the_system_message(run: Run, fake: Any) -> None:
    """What /clear keeps by mistake would colour every later answer."""
    run("chat", "bundle", "--system", "Brief.", stdin="one\n/clear\ntwo\n")
    system = {"role": "system", "content": "Brief."}
    assert fake.asked == [[system, *said("one")], [system, *said("two")]]


def test_exit_ends_before_the_rest_of_the_input(run: Run, fake: Any) -> None:
    """The command works in a script as it does for a person."""
    assert run("chat", "bundle", stdin="/help\n/exit\ntwo\n").exit_code == 0
    assert fake.asked == []


def test_chat_is_greedy_unless_asked_to_sample(run: Run, fake: Any) -> None:
    """The same default as `generate`: one rule to remember."""
    run("chat", "bundle", stdin="one\n")
    run("chat", "bundle", "--seed", "1", stdin="one\n")
    assert [params.temperature for params in fake.params] == [0, 1]


def test_conversation_too_long_for_the_model_says_what_to_do(run: Run, fake: Any) -> None:
    """A full context is no fault of the last message; starting anew helps, repeating does not."""
    fake.context = 2
    done = run("chat", "bundle", stdin="one\ntwo\n")
    assert done.exit_code == 1
    assert done.stderr.endswith(
        "error: the prompt has 3 messages; /clear starts a new conversation\n"
    )


def test_first_message_too_long_is_not_told_to_clear(run: Run, fake: Any) -> None:
    """There is nothing to clear yet."""
    fake.context = 0
    assert run("chat", "bundle", stdin="one\n").stderr == "error: the prompt has 1 messages\n"


@pytest.mark.parametrize(
    ("reason", "options", "told"),
    [("length", [], True), ("stop", [], False), ("length", ["--max-tokens", "3"], False)],
)
def test_answer_cut_by_the_context_is_explained(
    run: Run, fake: Any, reason: str, options: list[str], told: bool
) -> None:
    """An answer that stops in mid-sentence looks like a fault unless it is explained."""
    fake.finish_reason = reason
    done = run("chat", "bundle", *options, stdin="one\n")
    assert ("the context is full" in done.stderr) is told


def test_line_that_is_not_utf8_is_named(run: Run, fake: Any) -> None:
    """The lines before it are answered, and no garbage reaches the model."""
    done = run("chat", "bundle", stdin=b"one\ncaf\xe9\n")
    assert done.exit_code == 1
    assert "error: line 2 of standard input is not UTF-8" in done.stderr
    assert fake.asked == [said("one")]


def test_stopped_answer_gives_its_slot_back_at_once(fake: Any) -> None:
    """Left to the garbage collector, the slot would stay taken while the next answer begins."""
    events = fake.stream("x")
    answer = follow(lambda: events, show=lambda text: None, stopped=lambda: True)
    assert fake.streams_closed == 1
    assert (answer.text, answer.finish_reason, answer.usage) == ("Hello", None, None)


class Terminal:
    """A process on a pseudo-terminal: what it shows is read, what is typed is written."""

    def __init__(self, start: Callable[..., Any], *args: str, **environment: str) -> None:
        self.side, other = os.openpty()
        self.process: subprocess.Popen[bytes] = start(
            *args,
            env={"TERM": "xterm", "NO_COLOR": None, **environment},
            stdin=other,
            stdout=other,
            stderr=other,
        )
        os.close(other)
        self.shown = b""

    def wait_for(self, text: str, timeout_s: float = 30) -> bytes:
        """Read until `text` is shown; return what was shown before it."""
        give_up_s = time.monotonic() + timeout_s
        while text.encode() not in self.shown:
            ready, _, _ = select.select([self.side], [], [], give_up_s - time.monotonic())
            assert ready, f"{text!r} was not shown, but {self.shown!r}"
            self.shown += os.read(self.side, 4096)
        before, _, self.shown = self.shown.partition(text.encode())
        return before

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())

    def interrupt_at_the_prompt(self, done: Callable[[float], bool]) -> None:
        """Ctrl-C, and again while `done` (given seconds to wait) says that nothing came of it.

        An interrupt between showing the prompt and reading a key is noted by Python and acted on
        at the next one; noted twice, it is still one. Nobody types that fast, but a test does.
        """
        for _ in range(10):
            self.process.send_signal(signal.SIGINT)
            if done(3.0):
                return
        pytest.fail(f"nothing came of the interrupt; shown was {self.shown!r}")

    def shows(self, text: str, timeout_s: float) -> bool:
        """Whether `text` is shown in that time; what was read is kept."""
        give_up_s = time.monotonic() + timeout_s
        while text.encode() not in self.shown:
            left_s = max(0.0, give_up_s - time.monotonic())
            if not select.select([self.side], [], [], left_s)[0]:
                return False
            self.shown += os.read(self.side, 4096)
        return True

    def ended(self, timeout_s: float) -> bool:
        """Whether the process ends in that time."""
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@pytest.fixture
def terminal(run_fake: RunFake) -> Iterator[Callable[..., Terminal]]:
    """Starts the command line with a fake model on a terminal."""
    opened: list[Terminal] = []

    def start(*args: str, **environment: str) -> Terminal:
        opened.append(Terminal(run_fake, *args, **environment))
        return opened[-1]

    yield start
    for each in opened:
        os.close(each.side)


on_terminal = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


@on_terminal
def test_interrupt_stops_the_answer_and_not_the_program(terminal: Callable[..., Terminal]) -> None:
    """A person stops an answer that goes wrong and asks better; losing the chat would be cruel."""
    chat = terminal("chat", "b", FAKE_PIECES="1000", FAKE_DELAY_S="0.02")
    chat.wait_for("> ")
    chat.type("one\n")
    chat.wait_for("wörd3 ")
    chat.process.send_signal(signal.SIGINT)
    assert b"wor" not in chat.wait_for("tokens generated")
    chat.wait_for("> ")
    chat.type("/exit\n")
    assert chat.process.wait(timeout=30) == 0


@on_terminal
def test_interrupt_at_the_prompt_hints_then_leaves(terminal: Callable[..., Terminal]) -> None:
    """One Ctrl-C too many after an answer must not end the conversation; two are meant."""
    chat = terminal("chat", "b")
    chat.wait_for("> ")
    chat.interrupt_at_the_prompt(lambda timeout_s: chat.shows("Ctrl-C again", timeout_s))
    chat.wait_for("Ctrl-C again")
    chat.wait_for("> ")
    chat.interrupt_at_the_prompt(chat.ended)
    assert chat.process.wait(timeout=30) == 130


@on_terminal
def test_error_at_the_prompt_does_not_end_the_conversation(
    terminal: Callable[..., Terminal],
) -> None:
    """A person may clear a full context and go on; only a script ends there."""
    chat = terminal("chat", "b", FAKE_CONTEXT="2")
    for line in ("one\n", "two\n"):
        chat.wait_for("> ")
        chat.type(line)
    chat.wait_for("error: the prompt has 3 messages; /clear starts a new conversation")
    chat.wait_for("> ")
    chat.type("/clear\n")
    chat.wait_for("new conversation")
    chat.wait_for("> ")
    chat.type("three\n")
    chat.wait_for("tokens generated")


@on_terminal
def test_end_of_input_at_the_prompt_leaves(terminal: Callable[..., Terminal]) -> None:
    """Ctrl-D is what people type."""
    chat = terminal("chat", "b")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.process.wait(timeout=30) == 0


@on_terminal
@pytest.mark.parametrize("no_color", [False, True])
def test_timings_are_dim_unless_no_color(terminal: Callable[..., Terminal], no_color: bool) -> None:
    """NO_COLOR is a promise to people who cannot read dim text."""
    chat = terminal("generate", "b", "x", **({"NO_COLOR": "1"} if no_color else {}))
    assert (b"\x1b[" in chat.wait_for("tokens generated")) is not no_color
    assert chat.process.wait(timeout=30) == 0


def test_real_model_reuses_what_it_read(run_cli: RunCli, smollm2_bundle: Path) -> None:
    """The second turn reads its prompt from where the first one's ends."""
    done = run_cli("chat", smollm2_bundle, "--max-tokens", "4", input="Hi\nAnd now?\n")
    first, second = done.stderr.splitlines()
    assert "cached" not in first
    assert " cached)" in second
