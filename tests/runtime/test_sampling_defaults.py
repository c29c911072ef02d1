"""What a checkpoint says about sampling is used where the caller says nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_hf import tokenizer_json, write_folder

import ortolan
from ortolan.errors import BundleError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.runtime.params import SamplingParams
from ortolan.runtime.sampling_defaults import sampling_defaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": 2}, {}),
        ({"do_sample": None, "top_p": None}, {}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        # Kept beside temperature 0, for whoever raises the temperature.
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.0, "top_p": 0.9},
        ),
        ({"top_k": 500}, {"temperature": 1.0, "top_k": 300}),
        ({"top_k": -1}, {"temperature": 1.0, "top_k": 0}),
    ],
    ids=str,
)
def test_only_what_is_said_is_set(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    """A value that nobody gave stays open: Python and the command line fill it differently."""
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path, vocab_size=300) == expected


def test_a_value_out_of_range_is_refused_by_name(tmp_path: Path) -> None:
    """An answer sampled in a way that nobody meant shows no sign of it."""
    (tmp_path / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(BundleError, match=r"generation_config\.json: top_p is 1\.5; it must be"):
        sampling_defaults(tmp_path, vocab_size=300)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ortolan.LLM]:
    """A tiny model whose makers say: temperature 0, never twice the same token."""
    folder = tmp_path_factory.mktemp("stated")
    texts = {
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": {"chat_template": "{{ messages[0].content }}"},
        "generation_config.json": {"do_sample": False, "repetition_penalty": 1e6},
    }
    source = write_folder(folder / "model", texts=texts)
    export_bundle(str(source), folder / "bundle", ExportOptions())
    with ortolan.load(folder / "bundle", max_slots=1) as llm:
        yield llm


def test_calls_without_params_take_the_checkpoints(llm: ortolan.LLM) -> None:
    """With temperature 1, the field's default, a random model never answers twice alike."""
    assert llm.default_params == SamplingParams(temperature=0, repetition_penalty=1e6)
    (said,) = llm.generate([[5, 6, 7]], dataclasses.replace(llm.default_params, max_tokens=30))
    assert len(set(said.token_ids)) == len(said.token_ids)
    chat = [{"role": "user", "content": "ab"}]
    for unsaid, stated in (
        (llm.generate([[5, 6, 7]]), llm.generate([[5, 6, 7]], llm.default_params)),
        ([llm.chat(chat)], [llm.chat(chat, llm.default_params)]),
    ):
        assert [answer.token_ids for answer in unsaid] == [answer.token_ids for answer in stated]
    streamed = [event.token_id for event in llm.stream([5, 6, 7])]
    assert streamed == list(llm.generate([[5, 6, 7]])[0].token_ids)


def test_given_params_are_taken_as_they_are(llm: ortolan.LLM) -> None:
    """Settings mixed from two places would be settings that nobody wrote down."""
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (answer,) = llm.generate([[5, 6, 7]], plain)
    # Without the checkpoint's penalty this greedy model soon repeats itself.
    assert len(set(answer.token_ids)) < len(answer.token_ids)
