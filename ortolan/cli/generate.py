"""`ortolan generate`: one prompt or a file of them, and the answers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortolan.cli.options import (
    PROVIDER,
    SHARING,
    bundle_argument,
    debug_option,
    engine_options,
    json_option,
    utf8,
)
from ortolan.cli.output import note, write, write_json
from ortolan.cli.sampling import GivenSampling, answers_options, sampling_options
from ortolan.errors import RequestError, UsageError

if TYPE_CHECKING:
    from ortolan.runtime.llm import LLM
    from ortolan.runtime.params import SamplingParams


@click.command(short_help="Continue a prompt, or answer it; or a file of prompts.")
@bundle_argument
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "prompts_file",
    metavar="PROMPTS",
    type=click.Path(path_type=Path),
    help="In place of PROMPT: a file of prompts, one per line, or in a .jsonl an object each.",
)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --file: where the answers go.  [default: standard output]",
)
@click.option("--chat", is_flag=True, help="Put PROMPT into the chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@sampling_options
@answers_options
@engine_options(*PROVIDER, "threads", "cache_dir", "max_context", *SHARING, "accuracy")
@json_option
@debug_option
def generate(
    bundle: Path,
    prompt: str | None,
    prompts_file: Path | None,
    output: Path | None,
    chat: bool,
    system: str | None,
    sampling: GivenSampling,
    engine: dict[str, Any],
    as_json: bool,
) -> None:
    """Continue PROMPT, or answer it with --chat; - reads it from standard input.

    The text is printed as it comes, its timings after it on standard error. Standard input is
    UTF-8; one line break at its end is left out.

    With --file, many prompts run together, and each answer is printed as a line of JSON, in the
    order of the prompts. In a .jsonl file each line is an object with "prompt" (a text or token
    ids) or "messages", and if need be "id" and settings of its own, such as "max_tokens".
    """
    if system is not None and not chat:
        raise UsageError("--system has a meaning in a chat only; add --chat, or leave it out")
    if system is not None:
        system = utf8(system, "--system")
    if prompts_file is not None:
        if prompt is not None:
            raise UsageError("there are both PROMPT and --file; give one of them")
        _answer_file(bundle, prompts_file, output, chat, system, sampling, engine)
        return
    if prompt is None:
        raise UsageError("there is no prompt; give PROMPT, or --file")
    if output is not None:
        raise UsageError("--output goes with --file; leave it out")
    if not as_json and {"logprobs", "prompt_logprobs"} & sampling.fields.keys():
        raise UsageError("log-probabilities are shown in JSON only; add --json")
    prompt = _read_prompt() if prompt == "-" else utf8(prompt, "PROMPT")
    if not prompt:
        raise UsageError("PROMPT is empty; give some text")

    import ortolan

    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    with ortolan.load(bundle, **engine) as llm:
        params = sampling.over(llm.sampling_defaults)
        if params.n > 1:
            _several(llm, messages if chat else prompt, params, as_json)
        else:
            _one(llm, messages if chat else prompt, params, as_json)


def _one(
    llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams, json_wanted: bool
) -> None:
    """One answer, shown as it comes."""
    from ortolan.cli.answer import as_json, follow

    answer = follow(
        lambda: (
            llm.stream(prompt, params)
            if isinstance(prompt, str)
            else llm.stream_chat(prompt, params)
        ),
        show=(lambda text: None) if json_wanted else write,
    )
    if json_wanted:
        write_json(as_json(answer))
    else:
        write("\n")
        note(answer.timings())


def _several(
    llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams, json_wanted: bool
) -> None:
    """`n` answers to one prompt, which are made at the same time and shown one after the other."""
    from ortolan.cli.answer import as_json
    from ortolan.runtime.params import Request

    chat = not isinstance(prompt, str)
    ids = llm.encode_chat(prompt) if not isinstance(prompt, str) else llm.encode(prompt)
    began_s = time.perf_counter()
    (answers,) = llm.run([Request(ids, params, continues=not chat)])
    seconds = time.perf_counter() - began_s
    if json_wanted:
        write_json([as_json(answer) for answer in answers])
        return
    for number, answer in enumerate(answers, 1):
        write(f"--- {number} of {len(answers)} ---\n{answer.text}\n")
    _note_totals(
        f"{len(answers)} answers", sum(len(answer.token_ids) for answer in answers), seconds
    )


def _answer_file(
    bundle: Path,
    prompts_file: Path,
    output: Path | None,
    chat: bool,
    system: str | None,
    sampling: GivenSampling,
    engine: dict[str, Any],
) -> None:
    import ortolan
    from ortolan.cli.batch import answer_all, bar_beside, lines_to
    from ortolan.cli.prompt_file import read_prompts

    prompts = read_prompts(prompts_file, chat=chat, system=system)
    for prompt in prompts:
        prompt.sampling(sampling, {})  # now, before a model is loaded
    with lines_to(output) as write_line, ortolan.load(bundle, **engine) as llm:
        began_s = time.perf_counter()
        with bar_beside(output) as progress:
            tokens = answer_all(llm, prompts, sampling, write_line, progress)
        seconds = time.perf_counter() - began_s
    _note_totals(f"{len(prompts)} prompts", tokens, seconds)


def _note_totals(what: str, tokens: int, seconds: float) -> None:
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    note(f"{what}, {tokens} tokens generated in {seconds:.1f} s{rate}")


def _read_prompt() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8 at byte {error.start}; convert it to UTF-8"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")
