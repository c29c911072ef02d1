"""Many prompts at once: answers as JSON lines, in the order of the prompts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ortolan.cli.answer import as_json
from ortolan.cli.output import write
from ortolan.cli.progress import Progress, progress_bar
from ortolan.cli.prompt_file import FilePrompt
from ortolan.cli.sampling import GivenSampling
from ortolan.errors import OrtolanError, UsageError
from ortolan.runtime.params import Request

if TYPE_CHECKING:
    from ortolan.runtime.llm import LLM

Write = Callable[[str], None]


class FileOutputError(OrtolanError):
    """The file for the answers cannot be written."""


def answer_all(
    llm: LLM,
    prompts: Sequence[FilePrompt],
    sampling: GivenSampling,
    write_line: Write,
    progress: Progress | None = None,
) -> int:
    """Answer all prompts together and write a line per answer; how many tokens they have.

    Every prompt is checked before the first one runs. Raises RequestError, naming the line.
    """
    requests = [_request(llm, prompt, sampling) for prompt in prompts]
    tokens = 0
    for index, (prompt, answers) in enumerate(zip(prompts, llm.run(requests), strict=True)):
        for choice, answer in enumerate(answers):
            name = {} if prompt.id is None else {"id": prompt.id}
            fields = {"index": index, **name, "choice": choice, **as_json(answer)}
            write_line(json.dumps(fields, ensure_ascii=False) + "\n")
            tokens += len(answer.token_ids)
        if progress is not None:
            progress("prompts", index + 1, len(prompts))
    return tokens


def _request(llm: LLM, prompt: FilePrompt, sampling: GivenSampling) -> Request:
    params = prompt.sampling(sampling, llm.sampling_defaults)
    with prompt.named():
        if prompt.messages is not None:
            request = Request(llm.encode_chat(prompt.messages), params, continues=False)
        else:
            assert prompt.prompt is not None
            request = Request(llm.encode(prompt.prompt), params)
        llm.check(request)
    return request


@contextmanager
def lines_to(output: Path | None) -> Iterator[Write]:
    """Writes lines to standard output at once, or to a file that appears whole or not at all."""
    if output is None:
        yield write
        return
    with _whole_file(output) as write_line:
        yield write_line


@contextmanager
def bar_beside(output: Path | None) -> Iterator[Progress | None]:
    """A progress bar on a terminal, unless the answers are shown there."""
    if output is None and sys.stdout.isatty():
        yield None
        return
    with progress_bar() as progress:
        yield progress


@contextmanager
def _whole_file(path: Path) -> Iterator[Write]:
    """Writes to a file beside `path` that takes its place at the end; on any failure it vanishes.

    Raises UsageError where that cannot be, FileOutputError where writing fails.
    """
    # What a link points at is replaced, not the link.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise UsageError(f"--output {path} is not a file; name one, or leave --output out")
    draft = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        with _named(path):
            file = draft.open("w", encoding="utf-8", newline="\n")
        with file:
            yield partial(_write_to, file, path)
            with _named(path):
                file.flush()
                os.fsync(file.fileno())
        with _named(path):
            draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _write_to(file: TextIO, path: Path, line: str) -> None:
    with _named(path):
        file.write(line)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileOutputError(f"{path} cannot be written ({error.strerror})") from error
