"""Tokenizer, template and generation settings of a Hugging Face folder, as a bundle has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_hf import CONTROL, VOCAB, config, tokenizer_json, write_folder

import ortolan
from ortolan.errors import CheckpointError, ConfigError, RequestError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.hf_texts import hf_texts
from ortolan.runtime.sampling_defaults import sampling_defaults

END, START, STOP = range(3)  # ids of CONTROL


def texts(tmp_path: Path, **files: object) -> dict[str, bytes]:
    """What a folder with these files gives; `__` in a keyword stands for the dot."""
    named = {name.replace("__", "."): value for name, value in files.items()}
    folder = tmp_path / "model"
    for name, value in {"config.json": config(), **named}.items():
        folder.mkdir(exist_ok=True)
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        (folder / name).write_bytes(data)
    return hf_texts(folder, VOCAB)


def generation(tmp_path: Path, **files: object) -> dict[str, Any]:
    found = texts(tmp_path, tokenizer__json=tokenizer_json(), **files)
    loaded: dict[str, Any] = json.loads(found["generation_config.json"])
    return loaded


def test_tokenizer_json_is_kept_byte_for_byte(tmp_path: Path) -> None:
    """Written anew it could come to mean something else with the next version of the library."""
    data = json.dumps(tokenizer_json(), indent=3).encode()
    assert texts(tmp_path, tokenizer__json=data)["tokenizer.json"] == data


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is damaged"):
        texts(tmp_path, tokenizer__json=data)


def test_a_cut_tokenizer_is_refused(tmp_path: Path) -> None:
    data = json.dumps(tokenizer_json()).encode()
    with pytest.raises(CheckpointError, match="damaged"):
        texts(tmp_path, tokenizer__json=data[: len(data) // 2])


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """A token without a row in the embedding fails only when a text happens to have it."""
    big = tokenizer_json([f"token {i}" for i in range(100)])
    with pytest.raises(CheckpointError, match="do not belong together"):
        texts(tmp_path, tokenizer__json=big)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    """Such a bundle would export and then fail to open."""
    other = tokenizer_json() | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(ConfigError, match="WordPiece"):
        texts(tmp_path, tokenizer__json=other)


def test_a_token_that_only_the_configuration_adds_is_refused(tmp_path: Path) -> None:
    """transformers would add it; without it, a marker of the template would be plain text."""
    added = {"280": {"content": "<|tool|>", "special": True}}
    with pytest.raises(ConfigError, match=r"<\|tool\|>"):
        generation(tmp_path, tokenizer_config__json={"added_tokens_decoder": added})


TEMPLATES = {
    "text": ({"chat_template": "A"}, {}, b"A"),
    "named": (
        {"chat_template": [{"name": "tool_use", "template": "T"},
                           {"name": "default", "template": "D"}]},
        {},
        b"D",
    ),
    "named-without-default": ({"chat_template": [{"name": "rag", "template": "R"}]}, {}, None),
    "file": ({"chat_template": "A"}, {"chat_template.jinja": b"F \xc3\xa9"}, b"F \xc3\xa9"),
    "json-file": ({}, {"chat_template.json": b'{"chat_template": "J"}'}, b"J"),
    "none": ({}, {}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_is_found_where_transformers_finds_it(tmp_path: Path, name: str) -> None:
    """Without its template an instruction model answers as if it had not been asked."""
    settings, files, expected = TEMPLATES[name]
    found = texts(
        tmp_path, tokenizer__json=tokenizer_json(), tokenizer_config__json=settings, **files
    )
    assert found.get("chat_template.jinja") == expected


def test_a_template_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat_template"):
        generation(tmp_path, tokenizer_config__json={"chat_template": 7})


def test_generation_config_comes_before_config(tmp_path: Path) -> None:
    """Instruction models often have their end token in the former alone."""
    found = generation(
        tmp_path,
        config__json=config(eos_token_id=END, bos_token_id=START, pad_token_id=-1),
        generation_config__json={"eos_token_id": [STOP, END], "max_length": 99, "_from": "x"},
    )
    assert found == {"bos_token_id": START, "eos_token_id": [STOP, END]}


def test_config_is_asked_next_and_then_the_tokenizer(tmp_path: Path) -> None:
    found = generation(
        tmp_path,
        config__json=config(eos_token_id=STOP),
        tokenizer_config__json={
            "bos_token": {"content": CONTROL[START]},
            "pad_token": CONTROL[END],
            "unk_token": None,
        },
    )
    assert found == {"bos_token_id": START, "eos_token_id": STOP, "pad_token_id": END}


def test_special_tokens_map_is_asked_last(tmp_path: Path) -> None:
    assert generation(tmp_path, special_tokens_map__json={"eos_token": CONTROL[STOP]}) == {
        "eos_token_id": STOP
    }


def test_the_tokenizers_own_end_token_leads(tmp_path: Path) -> None:
    """The first is the one that a chat template writes between turns."""
    found = generation(
        tmp_path,
        generation_config__json={"eos_token_id": [END, STOP]},
        tokenizer_config__json={"eos_token": CONTROL[STOP]},
    )
    assert found == {"eos_token_id": [STOP, END]}


def test_sampling_defaults_are_kept(tmp_path: Path) -> None:
    """A model's makers say how it is meant to be sampled."""
    sampling = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }
    assert generation(tmp_path, generation_config__json={**sampling, "cache": "x"}) == sampling


@pytest.mark.parametrize(
    "wrong",
    [{"eos_token_id": VOCAB}, {"bos_token_id": -1}, {"eos_token_id": [2, "x"]},
     {"temperature": "hot"}, {"temperature": -1}, {"temperature": float("nan")},
     {"temperature": 10**400}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -2}, {"top_k": 20.0},
     {"top_k": True}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"do_sample": "no"},
     {"eos_token_id": True}],
    ids=str,
)  # fmt: skip
def test_senseless_generation_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """An end token that no logit stands for never ends an answer."""
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        generation(tmp_path, generation_config__json=wrong)


@pytest.mark.parametrize(
    "edge",
    [{"temperature": 0}, {"temperature": 1e8}, {"top_p": 1}, {"top_p": 1e-9}, {"top_k": -1},
     {"top_k": 0}, {"top_k": 10**30}, {"min_p": 0}, {"min_p": 1}, {"repetition_penalty": 1e-9}],
    ids=str,
)  # fmt: skip
def test_what_the_export_keeps_the_runtime_takes(tmp_path: Path, edge: dict[str, Any]) -> None:
    """The bounds stand in two rooms; a bundle that exports but never opens would be worst."""
    kept = generation(tmp_path, generation_config__json=edge)
    (tmp_path / "generation_config.json").write_text(json.dumps(kept))
    found = sampling_defaults(tmp_path, VOCAB)
    assert found.keys() >= edge.keys()
    ortolan.SamplingParams(**found).check_against_model(VOCAB)


def test_only_half_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Without tokenizer.json the bundle would come out with no tokenizer, in silence."""
    with pytest.raises(ConfigError, match=r"vocab\.json.*save_pretrained"):
        texts(tmp_path, vocab__json={"a": 0}, merges__txt=b"")


def test_a_bundle_without_a_tokenizer_works_with_ids(tmp_path: Path) -> None:
    """Bare weights are worth running too; text is refused, not guessed at."""
    source = write_folder(tmp_path / "model", config(eos_token_id=END))
    export_bundle(str(source), tmp_path / "bundle", ExportOptions())
    greedy = ortolan.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    with ortolan.load(tmp_path / "bundle") as llm:
        events = list(llm.stream([5, 6, 7], greedy))
        assert [event.text for event in events] == [""] * 4
        assert all(event.token_id is not None for event in events)
        assert llm.tokenizer.eos_ids == (END,)
        ask = "this bundle has no tokenizer; give token ids"
        with pytest.raises(RequestError, match=ask):
            llm.generate("text")
        with pytest.raises(RequestError, match=ask):
            llm.chat([{"role": "user", "content": "text"}])
        with pytest.raises(RequestError, match=ask):
            llm.generate([5], ortolan.SamplingParams(stop=["x"]))


def test_a_folder_with_a_tokenizer_answers_in_text(tmp_path: Path) -> None:
    source = write_folder(
        tmp_path / "model",
        texts={
            "tokenizer.json": tokenizer_json(),
            "tokenizer_config.json": {"chat_template": "{{ messages[0].content }}"},
        },
    )
    export_bundle(str(source), tmp_path / "bundle", ExportOptions())
    with ortolan.load(tmp_path / "bundle") as llm:
        assert llm.tokenizer.decode(llm.encode("a b")) == "a b"
        (answer,) = llm.generate("a b", ortolan.SamplingParams(max_tokens=3, temperature=0))
        assert len(answer.token_ids) == 3
        assert llm.encode_chat([{"role": "user", "content": "hey"}]) == llm.encode("hey")
