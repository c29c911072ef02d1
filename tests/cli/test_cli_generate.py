"""`ortolan generate`: what is asked of the model, and how its answer is shown."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ortolan.cli import output
from ortolan.cli.generate import generate
from ortolan.cli.options import SHARING, option_name
from ortolan.runtime.params import EngineConfig, SamplingParams

Run = Callable[..., Result]
RunFake = Callable[..., "subprocess.Popen[bytes]"]
RunCli = Callable[..., subprocess.CompletedProcess[str]]


def test_text_goes_to_stdout_and_timings_to_stderr(run: Run, fake: Any) -> None:
    """A pipe behind the command must receive the answer and nothing else."""
    done = run("generate", "bundle", "Say hello")
    assert done.exit_code == 0
    assert done.stdout == "Hello wörld 🐦\n"
    assert done.stderr.startswith("5 tokens read (3 cached), 3 tokens generated, first token after")
    assert done.stderr.endswith(" tokens/s\n")
    assert fake.asked == ["Say hello"]
    assert fake.closed


def test_each_piece_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person watching, or a program reading the pipe, must not wait for a full buffer."""
    calls: list[str] = []

    class Recorder:
        def write(self, text: str) -> None:
            calls.append(text)

        def flush(self) -> None:
            calls.append("flush")

    monkeypatch.setattr("sys.stdout", Recorder())
    output.write("a")
    output.write("b")
    assert calls == ["a", "flush", "b", "flush"]


def test_escape_codes_of_the_model_survive_a_pipe(run: Run, fake: Any) -> None:
    """The streamed text must be the answer, character for character."""
    fake.pieces = ["\x1b[1m", "bold\r\n"]
    assert run("generate", "bundle", "x").stdout_bytes == b"\x1b[1mbold\r\n\n"


def test_json_is_one_object_with_all_that_is_known(run: Run, fake: Any) -> None:
    """Programs read this; a key that moves breaks them."""
    done = run("generate", "bundle", "x", "--json")
    found = json.loads(done.stdout)
    assert found.pop("ttft_s") >= 0
    assert found.pop("tokens_per_s") > 0
    assert found == {
        "text": "Hello wörld 🐦",
        "token_ids": [0, 1, 2],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 3},
    }
    assert done.stderr == ""


def test_chat_wraps_the_prompt_in_messages(run: Run, fake: Any) -> None:
    """Without the template an instruct model continues the question instead of answering it."""
    run("generate", "bundle", "Who?", "--chat", "--system", "Be brief.")
    assert fake.asked == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    ]


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_dash_reads_standard_input(run: Run, fake: Any, ending: str) -> None:
    """The line break that echo and editors add would change the tokens."""
    assert run("generate", "bundle", "-", stdin=f"two\nlines é{ending}".encode()).exit_code == 0
    assert fake.asked == ["two\nlines é"]


def test_every_sampling_option_reaches_the_model(run: Run, fake: Any) -> None:
    """An option that is parsed and dropped is worse than none."""
    options = (
        "--max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty -0.3 --ignore-eos "
        "--stop END --stop . --logit-bias 5=-2.5 --logit-bias 6=1 --stop-token-ids 3 "
        "--stop-token-ids 4"
    )
    assert run("generate", "bundle", "x", *options.split()).exit_code == 0
    assert fake.params == [
        SamplingParams(
            max_tokens=9,
            temperature=0.5,
            top_k=4,
            top_p=0.9,
            min_p=0.1,
            seed=7,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            ignore_eos=True,
            stop=("END", "."),
            logit_bias={5: -2.5, 6: 1.0},
            stop_token_ids=(3, 4),
        )
    ]


def test_every_field_of_sampling_has_an_option() -> None:
    """What Python can ask for, the command line can."""
    options = {name for param in generate.params for name in param.opts}
    assert {option_name(item.name) for item in dataclasses.fields(SamplingParams)} <= options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], SamplingParams(temperature=0)),
        (["--max-tokens", "3"], SamplingParams(temperature=0, max_tokens=3)),
        (["--seed", "7"], SamplingParams(seed=7)),
        (["--top-p", "0.5"], SamplingParams(top_p=0.5)),
        (["--seed", "7", "--temperature", "0"], SamplingParams(seed=7, temperature=0)),
    ],
)
def test_greedy_unless_asked_to_sample(
    run: Run, fake: Any, options: list[str], expected: SamplingParams
) -> None:
    """A command run twice says the same, and --top-p alone is not without effect."""
    run("generate", "bundle", "x", *options)
    assert fake.params == [expected]


CAREFUL = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("checkpoint", "options", "expected"),
    [
        (CAREFUL, [], SamplingParams(**CAREFUL)),
        (CAREFUL, ["--max-tokens", "3"], SamplingParams(**CAREFUL, max_tokens=3)),
        (CAREFUL, ["--temperature", "0"], SamplingParams(**{**CAREFUL, "temperature": 0})),
        (CAREFUL, ["--top-p", "1"], SamplingParams(**{**CAREFUL, "top_p": 1.0})),
        (CAREFUL, ["--seed", "7"], SamplingParams(**CAREFUL, seed=7)),
        ({"temperature": 0.0}, [], SamplingParams(temperature=0)),
        ({"temperature": 0.0}, ["--seed", "7"], SamplingParams(temperature=1, seed=7)),
        (
            {"repetition_penalty": 1.1},
            ["--top-k", "4"],
            SamplingParams(repetition_penalty=1.1, top_k=4),
        ),
        ({"repetition_penalty": 1.1}, [], SamplingParams(temperature=0, repetition_penalty=1.1)),
    ],
    ids=str,
)
def test_options_win_over_the_checkpoint_and_it_over_our_defaults(
    run: Run, fake: Any, checkpoint: dict[str, Any], options: list[str], expected: SamplingParams
) -> None:
    """Whoever says nothing gets what the model's makers meant; whoever says something gets that."""
    fake.sampling_defaults = checkpoint
    for command in ("generate", "chat"):
        run(command, "bundle", *(["x"] if command == "generate" else []), *options, stdin="x\n")
    assert fake.params == [expected, expected]


def test_wrong_setting_is_refused_before_the_model_is_loaded(run: Run, fake: Any) -> None:
    """Loading a large model takes a while; a typing error must not wait for it."""
    done = run("generate", "bundle", "x", "--top-p", "2")
    assert done.exit_code == 2
    assert "--top-p is 2.0" in done.stderr
    assert fake.loaded is None


def test_engine_options_reach_load_with_the_fields_defaults(run: Run, fake: Any) -> None:
    """Two sets of defaults would drift apart."""
    run("generate", "bundle", "x")
    path, settings = fake.loaded
    assert path == Path("bundle")
    assert EngineConfig(**settings) == EngineConfig()
    run(
        *("generate", "bundle", "x", "--provider", "other", "--threads", "3"),
        *("--cache-dir", "there", "--max-context", "64", "--accuracy", "exact"),
    )
    assert fake.loaded[1] == {
        "provider": "other",
        "provider_options": {},
        "strict": False,
        "kv_copies": False,
        "threads": 3,
        "cache_dir": "there",
        "max_context": 64,
        "accuracy": "exact",
        **{name: getattr(EngineConfig(), name) for name in SHARING},
    }
    run(
        *("generate", "bundle", "x", "--max-slots", "3", "--kv-tokens", "99"),
        *("--prefix-cache-mb", "0", "--prefill-chunk", "32", "--gap-steps", "2", "--gap-ms", "9"),
        *("--decode-graph", "decode"),
    )
    assert {name: fake.loaded[1][name] for name in SHARING} == {
        "max_slots": 3,
        "kv_tokens": 99,
        "prefix_cache_mb": 0,
        "prefill_chunk": 32,
        "whole_prompt": 256,
        "gap_steps": 2.0,
        "gap_ms": 9.0,
        "decode_graph": "decode",
    }


def test_wrong_engine_setting_is_refused_before_the_model_is_loaded(run: Run, fake: Any) -> None:
    """As a wrong sampling setting is."""
    done = run("generate", "bundle", "x", "--gap-steps", "1")
    assert done.exit_code == 2
    assert "--gap-steps is 1.0" in done.stderr
    assert fake.loaded is None


@pytest.mark.parametrize("chat", [False, True])
def test_several_answers_are_told_apart(run: Run, fake: Any, chat: bool) -> None:
    """Two texts in a row could be one."""
    options = ["--chat"] if chat else []
    done = run("generate", "bundle", "x", "-n", "2", *options)
    assert done.stdout == "--- 1 of 2 ---\nHello wörld 🐦\n--- 2 of 2 ---\nHello wörld 🐦1\n"
    assert done.stderr.startswith("2 answers, 6 tokens generated in ")
    assert fake.continues == [not chat]
    assert fake.params == [SamplingParams(n=2)]  # greedy ones would be the same
    found = json.loads(run("generate", "bundle", "x", "--n", "2", "--json").stdout)
    assert [answer["text"] for answer in found] == ["Hello wörld 🐦", "Hello wörld 🐦1"]


def test_log_probabilities_need_json(run: Run, fake: Any) -> None:
    """An option that shows nothing is a mistake."""
    for option in ("--logprobs", "--prompt-logprobs"):
        done = run("generate", "bundle", "x", option, "1")
        assert done.exit_code == 2
        assert "add --json" in done.stderr
    assert run("generate", "bundle", "x", "--json", "--logprobs", "2").exit_code == 0
    assert fake.params[0].logprobs == 2


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
)
def test_output_is_utf8_in_any_locale(run_fake: RunFake, locale: dict[str, str]) -> None:
    """A container without a locale must not crash on the first accent."""
    done = run_fake("generate", "bundle", "ö", env={"PYTHONIOENCODING": None, **locale})
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert out.decode("utf-8") == "wörd0 wörd1 wörd2 \n"


def test_answer_of_no_tokens_has_no_timings(run: Run, fake: Any) -> None:
    """max_tokens 0 is allowed; its missing numbers are left out, not divided by zero."""
    fake.pieces = []
    done = run("generate", "bundle", "x")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "\n", "0 tokens generated\n")


def test_real_model_answers(run_cli: RunCli, smollm2_bundle: Path) -> None:
    """The first thing that a new user runs; exact, since the reference's lead is small here."""
    question = "What is the capital of France?"
    done = run_cli("generate", smollm2_bundle, question, "--chat", "--accuracy", "exact")
    assert done.stdout == "The capital of France is Paris.\n"
    assert "37 tokens read, 8 tokens generated, first token after" in done.stderr
