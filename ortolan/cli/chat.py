"""`ortolan chat`: a conversation on the terminal, or with whatever writes to standard input."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import click

from ortolan.cli.options import (
    PROVIDER,
    bundle_argument,
    debug_option,
    engine_options,
    utf8,
)
from ortolan.cli.output import note, one_line, write
from ortolan.cli.sampling import GivenSampling, sampling_options
from ortolan.errors import OrtolanError, RequestError

if TYPE_CHECKING:
    from ortolan.cli.answer import EventLike
    from ortolan.runtime.params import SamplingParams

HELP = "/clear starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@click.command(short_help="Talk with a model.")
@bundle_argument
@click.option("--system", metavar="TEXT", help="The system message.")
@sampling_options
@engine_options(*PROVIDER, "threads", "cache_dir", "max_context", "accuracy")
@debug_option
def chat(bundle: Path, system: str | None, sampling: GivenSampling, engine: dict[str, Any]) -> None:
    """Talk with BUNDLE's model, a line a message.

    /clear starts a new conversation, /exit or the end of the input leaves. Ctrl-C stops an
    answer. Timings are printed on standard error.
    """
    import ortolan

    if system is not None:
        system = utf8(system, "--system")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with ortolan.load(bundle, max_slots=1, **engine) as llm:
        if interactive:
            note(HELP)
        params = sampling.over(llm.sampling_defaults)
        Conversation(llm, params, system, interactive).run()


class Answering(Protocol):
    """Whatever answers a conversation: a model, or a server."""

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Iterator[EventLike]: ...


class Conversation:
    """Messages so far, and the loop that adds to them."""

    def __init__(
        self, llm: Answering, params: SamplingParams, system: str | None, interactive: bool
    ) -> None:
        self._interactive = interactive
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)

    def run(self) -> None:
        """Answer each line. Someone at a terminal may go on after an error; a script ends there."""
        for line in _typed_lines() if self._interactive else _piped_lines():
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/clear":
                    self._messages = list(self._opening)
                    note("new conversation")
                    continue
                case "/help":
                    note(HELP)
                    continue
            try:
                self._answer(line)
            except OrtolanError as error:
                if not self._interactive:
                    raise
                note(f"error: {one_line(str(error))}")

    def _answer(self, line: str) -> None:
        from ortolan.cli.answer import follow

        messages = [*self._messages, {"role": "user", "content": line}]
        with _interrupts(self._interactive) as interrupted:
            try:
                answer = follow(
                    lambda: self._llm.stream_chat(messages, self._params),
                    show=write,
                    stopped=interrupted.is_set,
                )
            except RequestError as error:
                if len(self._messages) == len(self._opening):
                    raise
                raise RequestError(f"{error}; /clear starts a new conversation") from error
        write("\n")
        # A question that got no word of an answer is not part of the conversation.
        if answer.text:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        note(f"[{answer.timings()}]")
        limit = self._params.max_tokens
        if answer.finish_reason == "length" and (limit is None or len(answer.token_ids) < limit):
            note("the context is full, so the answer ends here; /clear starts a new conversation")


def _typed_lines() -> Iterator[str]:
    with suppress(ImportError):  # Windows has none; input() edits lines there too
        import readline  # noqa: F401  (importing it is what gives input() its history)
    interrupts = 0
    while interrupts < 2:
        try:
            line = input("> ")
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            interrupts += 1
            write("\n")
            note("Ctrl-C again, Ctrl-D or /exit leaves")
        else:
            interrupts = 0
            yield line
    raise KeyboardInterrupt


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin, 1):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"line {number} of standard input is not UTF-8; convert it to UTF-8"
            ) from error
        yield line.removesuffix("\n")


@contextmanager
def _interrupts(held_back: bool) -> Iterator[Event]:
    """Ctrl-C sets the event instead of raising in the midst of a step; twice it raises.

    Unless `held_back`, it raises at once, as ever.
    """
    interrupted = Event()
    if not held_back:
        yield interrupted
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
