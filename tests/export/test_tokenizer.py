"""GGUF vocabularies become the tokenizer files of a bundle, with the reference's ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.tokenizer import PRE_TOKENIZERS, tokenizer_files
from ortolan.runtime.text.chat_template import ChatTemplate
from ortolan.runtime.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"


def metadata_of(gguf_file: Path) -> dict[str, object]:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(gguf_file)
    return {key: field.contents() for key, field in reader.fields.items()}


def ggml(**values: object) -> dict[str, object]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.fixture
def byte_level() -> dict[str, object]:
    """A byte-level vocabulary of two control tokens, the 256 bytes and a few merges."""
    merges = ["o k", "Ġ ok", "4 2", "42 2"]
    made = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *made]
    types = [CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 2)
    return ggml(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        token_type=types,
        merges=merges,
        bos_token_id=0,
        eos_token_id=1,
    )


@pytest.fixture
def sentencepiece() -> dict[str, object]:
    """A SentencePiece vocabulary with byte fallback, whose scores prefer `bc` to `ab`.

    Its pieces can spell the control token `<s>` and the byte token `<0x41>`.
    """
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    pieces = {SPACE + "a": -3.0, "ab": -2.0, "bc": -1.0, "<s": -5.0}
    pieces |= {"<0": -6.0, "<0x": -6.0, "<0x4": -6.0, "1>": -6.0}
    letters = dict.fromkeys([SPACE, *"abc<s>0x41"], -9.0)
    plain = pieces | letters
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    return ggml(
        model="llama",
        tokens=tokens,
        token_type=[*special.values(), *[BYTE] * 256, *[NORMAL] * len(plain)],
        scores=[0.0] * 259 + list(plain.values()),
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """Writes the files of some metadata and opens them as the runtime does."""

    def open_files(metadata: dict[str, object]) -> Tokenizer:
        for name, content in tokenizer_files(metadata).items():
            (tmp_path / name).write_bytes(content)
        return Tokenizer.open(tmp_path)

    return open_files


# Against someone else's results


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "smollm", "llama-spm"])
def test_ids_equal_the_reference(shared: Path, opened: Any, name: str) -> None:
    """llama.cpp and sentencepiece on 32 hard texts: one other id is another prompt."""
    tokenizer = opened(metadata_of(shared / f"golden/tokenizers/{name}.gguf"))
    expected = json.loads((shared / f"golden/tokenizers/{name}.json").read_text())
    before = [tokenizer.bos_id] if name == "llama-spm" else []  # the reference adds no BOS
    for case in expected["cases"]:
        assert tokenizer.encode(case["text"]) == [*before, *case["ids"]], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_smollm2_prompts_equal_transformers(
    shared: Path, smollm2_gguf: Path, opened: Any, tmp_path: Path
) -> None:
    """The demo model reads plain prompts and chats exactly as its authors' code does."""
    tokenizer = opened(metadata_of(smollm2_gguf))
    chat = ChatTemplate.open(tmp_path, tokenizer)
    for case in json.loads((shared / "golden/smollm2.json").read_text())["cases"]:
        if "messages" in case:
            rendered = chat.render(case["messages"])
            assert rendered.text == case["rendered"]
            assert tokenizer.encode_chat(rendered) == case["prompt_ids"], case["name"]
        else:
            assert tokenizer.encode(case["text"]) == case["prompt_ids"], case["name"]
        shown = case["greedy_text"].removesuffix("<|im_end|>")
        assert tokenizer.decode(case["greedy_ids"]) == shown
    assert tokenizer.eos_ids == (2,)


# Byte-level BPE


@pytest.mark.parametrize(
    ("pre", "numbers"), [("gpt-2", 1), ("smollm", 3), ("qwen2", 3), ("llama-bpe", 1)]
)
def test_digits_are_cut_as_the_pre_tokenizer_says(
    byte_level: dict[str, object], opened: Any, pre: str, numbers: int
) -> None:
    """The families differ here above all; a wrong one ruins arithmetic in silence."""
    metadata = byte_level | ggml(pre=pre, add_bos_token=False)
    assert len(opened(metadata).encode("422")) == numbers


def test_llama_3_adds_bos_where_the_file_does_not_say(
    byte_level: dict[str, object], opened: Any
) -> None:
    """As llama.cpp does; what the file says goes before."""
    assert opened(byte_level | ggml(pre="llama-bpe")).encode("ok")[0] == 0
    assert opened(byte_level | ggml(pre="llama-bpe", add_bos_token=False)).encode("ok")[0] != 0
    assert opened(byte_level).encode("ok")[0] != 0
    assert opened(byte_level | ggml(add_bos_token=True)).encode("ok")[0] == 0


def test_llama_3_takes_a_word_that_is_a_token_whole(
    byte_level: dict[str, Any], opened: Any
) -> None:
    """Its vocabulary has words that no merges lead to; other families spell them."""
    tokens = [*byte_level["tokenizer.ggml.tokens"], "zq"]
    types = [*byte_level["tokenizer.ggml.token_type"], NORMAL]
    metadata = byte_level | ggml(tokens=tokens, token_type=types, add_bos_token=False)
    assert opened(metadata | ggml(pre="llama-bpe")).encode("zq") == [len(tokens) - 1]
    assert len(opened(metadata | ggml(pre="gpt-2")).encode("zq")) == 2


def test_eos_is_added_where_the_file_says_so(byte_level: dict[str, object], opened: Any) -> None:
    ids = opened(byte_level | ggml(add_bos_token=True, add_eos_token=True)).encode("ok")
    assert (ids[0], ids[-1], len(ids)) == (0, 1, 3)


def test_kinds_of_tokens(byte_level: dict[str, Any], opened: Any) -> None:
    """Control tokens never show, user-defined ones do, and padding is no token at all."""
    tokens = [*byte_level["tokenizer.ggml.tokens"], "<tool>", "[PAD263]", "[PAD264]"]
    types = [*byte_level["tokenizer.ggml.token_type"], USER_DEFINED, UNUSED, UNUSED]
    tokenizer = opened(byte_level | ggml(tokens=tokens, token_type=types))
    tool = tokens.index("<tool>")
    assert tokenizer.is_special(0)
    assert not tokenizer.is_special(tool)
    assert tokenizer.decode([0, tool]) == "<tool>"
    assert tokenizer.vocab_size == tool + 1
    assert tool not in tokenizer.encode("<tool>")


def test_end_token_of_ordinary_type_is_special(byte_level: dict[str, Any], opened: Any) -> None:
    """Some files mark it wrongly; an answer must not show it all the same."""
    types = [NORMAL, *byte_level["tokenizer.ggml.token_type"][1:]]
    tokenizer = opened(byte_level | ggml(token_type=types, eos_token_id=0, bos_token_id=1))
    assert tokenizer.is_special(0)


# SentencePiece


def test_highest_score_is_joined_first(sentencepiece: dict[str, object], opened: Any) -> None:
    """`ab` comes first in the text and in the vocabulary; the score decides."""
    tokenizer = opened(sentencepiece | ggml(add_space_prefix=False, add_bos_token=False))
    assert [tokenizer.token(index) for index in tokenizer.encode("abc")] == ["a", "bc"]
    assert [tokenizer.token(index) for index in tokenizer.encode("abb")] == ["ab", "b"]


def test_leading_space_and_bos_are_the_default(
    sentencepiece: dict[str, object], opened: Any
) -> None:
    tokenizer = opened(sentencepiece)
    assert [tokenizer.token(index) for index in tokenizer.encode("a")] == ["<s>", SPACE + "a"]
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    bare = opened(sentencepiece | ggml(add_space_prefix=False, add_bos_token=False))
    assert [bare.token(index) for index in bare.encode("a")] == ["a"]
    assert bare.decode(bare.encode(" a")) == " a"


def test_unknown_characters_fall_back_to_bytes(
    sentencepiece: dict[str, object], opened: Any
) -> None:
    tokenizer = opened(sentencepiece)
    assert tokenizer.encode("é")[-2:] == [3 + 0xC3, 3 + 0xA9]


@pytest.mark.parametrize("text", ["a<s>", "<0x41>"])
def test_pieces_do_not_join_to_a_control_or_byte_token(
    sentencepiece: dict[str, object], opened: Any, text: str
) -> None:
    """`<s` and `>` are ordinary pieces; together they must not begin a text anew."""
    tokenizer = opened(sentencepiece)
    ids = tokenizer.encode(text)
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == text


def test_unknown_characters_in_a_row_are_one_token_without_byte_tokens(
    sentencepiece: dict[str, Any], opened: Any
) -> None:
    """As sentencepiece does for a vocabulary without byte fallback."""
    tokens = [token.replace("<0xC3>", "gone") for token in sentencepiece["tokenizer.ggml.tokens"]]
    ids = opened(sentencepiece | ggml(tokens=tokens, add_space_prefix=False)).encode("aéüa")
    assert ids[2] == 0
    assert len(ids) == 4


# The other files


def test_generation_config_lists_every_end(byte_level: dict[str, object]) -> None:
    """Llama 3 ends a turn, a message and a text with different tokens."""
    files = tokenizer_files(
        byte_level | ggml(eot_token_id=0, eom_token_id=1, padding_token_id=1, bos_token_id=0)
    )
    assert json.loads(files["generation_config.json"]) == {
        "bos_token_id": 0,
        "eos_token_id": [1, 0],
        "pad_token_id": 1,
    }
    single = json.loads(tokenizer_files(byte_level)["generation_config.json"])
    assert single["eos_token_id"] == 1


def test_chat_template_is_kept_to_the_byte(byte_level: dict[str, object]) -> None:
    assert "chat_template.jinja" not in tokenizer_files(byte_level)
    files = tokenizer_files(byte_level | {"tokenizer.chat_template": "{{ 'é' }}\n\n"})
    assert files["chat_template.jinja"] == "{{ 'é' }}\n\n".encode()


# What is refused


def test_unknown_family_is_named(byte_level: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"'bert'.*'gpt2' and 'llama'"):
        tokenizer_files(byte_level | ggml(model="bert"))


@pytest.mark.parametrize("pre", ["default", "", "tekken"])
def test_unknown_pre_tokenizer_is_named(byte_level: dict[str, object], pre: str) -> None:
    """A guess would be nearly right, which nobody notices."""
    with pytest.raises(ConfigError) as error:
        tokenizer_files(byte_level | ggml(pre=pre))
    assert repr(pre) in str(error.value)
    assert all(repr(known) in str(error.value) for known in PRE_TOKENIZERS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": [1, 2]}, "tokens is not a list of str"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["o zz"]}, "'o zz'"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"eos_token_id": 100_000}, "eos_token_id is 100000"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
    ],
)
def test_damaged_metadata_is_named(
    byte_level: dict[str, object], change: dict[str, object], words: str
) -> None:
    """Half a download is told from a model that we cannot express."""
    with pytest.raises(CheckpointError, match=words):
        tokenizer_files(byte_level | ggml(**change))


def test_sentencepiece_without_scores_is_refused(sentencepiece: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="scores is missing"):
        tokenizer_files(sentencepiece | ggml(scores=None))
