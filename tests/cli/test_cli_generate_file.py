"""`ortolan generate --file`: what is read, what is refused, what is written and when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ortolan.runtime.params import SamplingParams

Run = Callable[..., Result]
RunFake = Callable[..., "subprocess.Popen[bytes]"]
RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of prompts."""

    def write(content: str | bytes, name: str = "prompts.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def lines(done: Result) -> list[dict[str, Any]]:
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_prompt_per_line_and_an_answer_per_line(run: Run, fake: Any, prompts: Any) -> None:
    """Programs read this; a key that moves breaks them."""
    done = run("generate", "bundle", "--file", prompts("one\r\n  two \u2028 2\nthree"))
    assert fake.asked == ["one", "  two \u2028 2", "three"]
    assert fake.continues == [True] * 3
    assert lines(done) == [
        {
            "index": index,
            "choice": 0,
            "text": "Hello wörld 🐦",
            "token_ids": [0, 1, 2],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 3},
            "ttft_s": 0.5,
        }
        for index in range(3)
    ]
    assert done.stderr.startswith("3 prompts, 9 tokens generated in ")
    assert fake.params == [SamplingParams(temperature=0)] * 3


def test_objects_have_ids_and_settings_of_their_own(run: Run, fake: Any, prompts: Any) -> None:
    """A line's settings win over the options, as these do over the checkpoint."""
    path = prompts(
        '{"prompt": "one", "id": "a", "max_tokens": 3, "logit_bias": {"5": -1}}\n\n'
        '{"prompt": [4, 5], "temperature": 0.5, "stop": "x"}\n'
        '{"messages": [{"role": "user", "content": "Who?"}], "id": 7, "n": 2}\n',
        "prompts.jsonl",
    )
    done = run("generate", "bundle", "--file", path, "--max-tokens", "9")
    keys = [(found["index"], found.get("id"), found["choice"]) for found in lines(done)]
    assert keys == [(0, "a", 0), (1, None, 0), (2, 7, 0), (2, 7, 1)]
    assert fake.asked == ["one", [4, 5], [{"role": "user", "content": "Who?"}]]
    assert fake.continues == [True, True, False]
    assert fake.params == [
        SamplingParams(max_tokens=3, temperature=0, logit_bias={5: -1}),
        SamplingParams(max_tokens=9, temperature=0.5, stop="x"),
        SamplingParams(max_tokens=9, n=2),
    ]


def test_chat_wraps_every_line(run: Run, fake: Any, prompts: Any) -> None:
    done = run(
        *("generate", "bundle", "--file", prompts("a\nb"), "--chat", "--system", "Be brief."),
    )
    assert len(lines(done)) == 2
    system = {"role": "system", "content": "Be brief."}
    assert fake.asked == [[system, {"role": "user", "content": text}] for text in "ab"]


def test_dash_is_standard_input(run: Run, fake: Any) -> None:
    assert len(lines(run("generate", "bundle", "--file", "-", stdin="a\nb\n"))) == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", "", "p.txt holds no prompt"),
        ("p.txt", "a\n\nb", "p.txt, line 2 is empty"),
        ("p.txt", b"a\n\xff", "p.txt, line 2 is not UTF-8"),
        ("p.jsonl", "\n\n", "p.jsonl holds no prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{', "p.jsonl, line 2 is no JSON object"),
        ("p.jsonl", '"a"', "p.jsonl, line 1 is no JSON object"),
        ("p.jsonl", "[" * 100_000, "p.jsonl, line 1 is no JSON object"),
        ("p.jsonl", '{"prompt": "\\ud800"}', "p.jsonl, line 1 is no JSON object"),
        ("p.jsonl", '\n{"text": "a"}', "p.jsonl, line 2 has the key 'text'; there are id"),
        ("p.jsonl", '{"id": 1}', 'line 1 needs either "prompt" or "messages"'),
        ("p.jsonl", '{"prompt": "a", "messages": []}', "line 1 needs either"),
        ("p.jsonl", '{"prompt": ""}', "line 1: prompt must be a text"),
        ("p.jsonl", '{"prompt": [1, true]}', "line 1: prompt must be a text"),
        ("p.jsonl", '{"messages": ["a"]}', "line 1: messages must be a list"),
        ("p.jsonl", '{"prompt": "a", "id": [1]}', "line 1: id must be"),
        ("p.jsonl", '{"prompt": "a", "top_p": 2}', "line 1: top_p is 2"),
        ("p.jsonl", '{"prompt": "a", "n": "2"}', "line 1: n is '2'"),
        ("p.jsonl", '{"prompt": "a", "logit_bias": {"x": 1}}', "line 1: logit_bias has"),
    ],
)
def test_what_is_no_prompt_is_refused_before_the_model_is_loaded(
    run: Run, fake: Any, prompts: Any, name: str, content: str | bytes, said: str
) -> None:
    """A thousand answers must not be lost to a typing error in the last line."""
    done = run("generate", "bundle", "--file", prompts(content, name))
    assert done.exit_code == 1
    assert said in done.stderr
    assert fake.loaded is None


def test_what_the_model_refuses_names_the_line_and_runs_nothing(
    run: Run, fake: Any, prompts: Any
) -> None:
    path = prompts('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 666}\n', "p.jsonl")
    done = run("generate", "bundle", "--file", path)
    assert done.exit_code == 1
    assert "p.jsonl, line 2: max_tokens is 666; the model refuses" in done.stderr
    assert fake.params == []
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "there is no prompt"),
        (["x", "--file", "p.txt"], "both PROMPT and --file"),
        (["x", "--output", "o"], "--output goes with --file"),
        (["--file", "p.txt", "--output", "."], "--output . is not a file"),
    ],
)
def test_options_that_do_not_go_together(
    run: Run, fake: Any, prompts: Any, options: list[str], said: str
) -> None:
    path = prompts("a", "p.txt")
    done = run("generate", "bundle", *[str(path) if o == "p.txt" else o for o in options])
    assert done.exit_code == 2
    assert said in done.stderr
    assert fake.loaded is None


def test_output_is_a_whole_file(run: Run, fake: Any, prompts: Any, tmp_path: Path) -> None:
    target = tmp_path / "answers.jsonl"
    target.write_text("old")
    done = run("generate", "bundle", "--file", prompts("a\nb"), "--output", target)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ""
    found = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [line["index"] for line in found] == [0, 1]
    assert names_in(tmp_path) == ["answers.jsonl", "prompts.txt"]


def test_output_is_untouched_by_a_run_that_fails(
    run: Run, fake: Any, prompts: Any, tmp_path: Path
) -> None:
    """Half a file that looks like a whole one is worse than none."""
    target = tmp_path / "answers.jsonl"
    target.write_text("old")
    fake.fails_at = 2
    done = run("generate", "bundle", "--file", prompts("a\nb"), "--output", target)
    assert done.exit_code == 1
    assert target.read_text() == "old"
    assert names_in(tmp_path) == ["answers.jsonl", "prompts.txt"]


def test_output_that_cannot_be_written_is_known_before_the_model_is_loaded(
    run: Run, fake: Any, prompts: Any, tmp_path: Path
) -> None:
    target = tmp_path / "nowhere" / "answers.jsonl"
    done = run("generate", "bundle", "--file", prompts("a"), "--output", target)
    assert done.exit_code == 1
    assert "answers.jsonl cannot be written (No such file or directory)" in done.stderr
    assert fake.loaded is None


def test_interrupt_leaves_what_is_finished_and_no_partial_file(
    run_fake: RunFake, prompts: Any, tmp_path: Path
) -> None:
    """Hours of answers must not be lost to Ctrl-C, and a shell's loop must stop there."""
    path = prompts("\n".join("abcdefgh"))
    slow = {"FAKE_DELAY_S": "0.2"}
    program = run_fake("generate", "bundle", "--file", path, env=slow)
    assert program.stdout is not None
    first = json.loads(program.stdout.readline())
    program.send_signal(signal.SIGINT)
    rest, err = program.communicate(timeout=60)
    assert program.returncode == 130, err
    assert [first["index"], *(json.loads(line)["index"] for line in rest.splitlines())] == list(
        range(1 + len(rest.splitlines()))
    )
    assert len(rest.splitlines()) < 7

    target = tmp_path / "answers.jsonl"
    program = run_fake("generate", "bundle", "--file", path, "--output", target, env=slow)
    while len(names_in(tmp_path)) == 1:
        time.sleep(0.01)
    time.sleep(0.3)
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=60)
    assert program.returncode == 130
    assert names_in(tmp_path) == ["prompts.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize(("no_color", "bar"), [(None, True), ("1", False)])
def test_a_bar_counts_prompts_on_a_terminal_only(
    run_fake: RunFake, prompts: Any, no_color: str | None, bar: bool
) -> None:
    """Logs and pipes must not fill with escape codes."""
    import pty

    ours, theirs = pty.openpty()
    env = {"NO_COLOR": no_color, "TERM": "xterm", "FAKE_DELAY_S": "0.3"}
    program = run_fake("generate", "bundle", "--file", prompts("a\nb"), env=env, stderr=theirs)
    os.close(theirs)
    out, _ = program.communicate(timeout=60)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert program.returncode == 0
    assert len(out.splitlines()) == 2
    assert (b"prompts" in shown.split(b"2 prompts")[0]) is bar
    assert (b"\x1b" in shown) is bar


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 10_000)
    except OSError:  # the other side has been closed
        return b""


def test_real_model_answers_a_file(run_cli: RunCli, smollm2_bundle: Path, tmp_path: Path) -> None:
    """In company as alone: the demo's question among others."""
    path = tmp_path / "p.jsonl"
    asked = [
        {"prompt": "The three primary colours are", "max_tokens": 5, "logprobs": 1},
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "id": "q"},
        {"prompt": "Once upon", "max_tokens": 5, "prompt_logprobs": 0},
    ]
    path.write_text("\n".join(map(json.dumps, asked)))
    done = run_cli("generate", smollm2_bundle, "--file", path, "--accuracy", "exact")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found[1]["text"] == "The capital of France is Paris."
    assert found[1]["id"] == "q"
    assert len(found[0]["logprobs"]) == len(found[0]["logprobs"][0]["top"]) + 4 == 5
    assert found[2]["prompt_logprobs"][0] is None
    assert b"".join(bytes(p["bytes"]) for p in found[0]["logprobs"]).decode() == found[0]["text"]
