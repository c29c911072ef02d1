"""`ortolan generate`: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from ortolan.cli.options import (
    bundle_argument,
    debug_option,
    engine_options,
    json_option,
    utf8,
)
from ortolan.cli.output import note, write, write_json
from ortolan.cli.sampling import GivenSampling, sampling_options
from ortolan.errors import RequestError, UsageError


@click.command(short_help="Continue a prompt, or answer it.")
@bundle_argument
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Put PROMPT into the chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@sampling_options
@engine_options("provider", "threads", "cache_dir", "max_context", "accuracy")
@json_option
@debug_option
def generate(
    bundle: Path,
    prompt: str,
    chat: bool,
    system: str | None,
    sampling: GivenSampling,
    engine: dict[str, Any],
    as_json: bool,
) -> None:
    """Continue PROMPT, or answer it with --chat; - reads it from standard input.

    The text is printed as it comes, its timings after it on standard error. Standard input is
    UTF-8; one line break at its end is left out.
    """
    if system is not None and not chat:
        raise UsageError("--system has a meaning in a chat only; add --chat, or leave it out")
    if system is not None:
        system = utf8(system, "--system")
    prompt = _read_prompt() if prompt == "-" else utf8(prompt, "PROMPT")
    if not prompt:
        raise UsageError("PROMPT is empty; give some text")

    import ortolan
    from ortolan.cli.answer import follow

    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    with ortolan.load(bundle, **engine) as llm:
        params = sampling.over(llm.sampling_defaults)
        answer = follow(
            lambda: llm.stream_chat(messages, params) if chat else llm.stream(prompt, params),
            show=(lambda text: None) if as_json else write,
        )
    if as_json:
        write_json(dataclasses.asdict(answer))
    else:
        write("\n")
        note(answer.timings())


def _read_prompt() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8 at byte {error.start}; convert it to UTF-8"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")
