"""tokenizer.model, for folders that have nothing else, converted as transformers converts it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny_hf import VOCAB

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.hf_texts import hf_texts
from ortolan.runtime.text.tokenizer import Tokenizer


def converted(folder: Path, model: bytes, settings: dict[str, Any]) -> dict[str, bytes]:
    """What a folder with these two files gives."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return hf_texts(folder, VOCAB)


# tokenizer.model: protocol buffers, written by hand.
def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def whole(key: int, value: int) -> bytes:
    return varint(key << 3) + varint(value % 2**64)


def data(key: int, value: bytes) -> bytes:
    return varint(key << 3 | 2) + varint(len(value)) + value


def model_file(
    pieces: Iterable[tuple[str, float, int]], trainer: bytes = b"", normalizer: bytes = b""
) -> bytes:
    """A SentencePiece BPE model that leaves text as it is."""
    rows = (
        data(1, data(1, text.encode()) + b"\x15" + struct.pack("<f", score) + whole(3, kind))
        for text, score, kind in pieces
    )
    spec = data(2, whole(3, 2) + whole(43, -1) + trainer)
    return b"".join(rows) + spec + data(3, whole(4, 0) + normalizer)


PIECES = [
    ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    ("▁a", -1.0, 1), ("bc", -2.0, 1), ("▁", -3.0, 1), ("a", -4.0, 1), ("b", -5.0, 1),
    ("c", -6.0, 1),
]  # fmt: skip


def opened(tmp_path: Path, model: bytes, settings: dict[str, Any] | None = None) -> Tokenizer:
    found = converted(tmp_path / "model", model, settings or {})
    for name, content in found.items():
        (tmp_path / name).write_bytes(content)
    return Tokenizer.open(tmp_path)


def spelled(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token(index) for index in tokenizer.encode(text)]


def test_tokenizer_model_is_converted(tmp_path: Path) -> None:
    """Llama 2's form: BOS, a leading space, bytes where there is no token."""
    tokenizer = opened(tmp_path, model_file(PIECES), {"eos_token": "</s>"})
    assert spelled(tokenizer, "abc é") == ["<s>", "▁a", "bc", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é")) == "abc é"
    assert tokenizer.eos_ids == (2,)


def test_the_configuration_decides_about_bos_and_spaces(tmp_path: Path) -> None:
    settings = {"add_bos_token": False, "add_prefix_space": False}
    assert spelled(opened(tmp_path, model_file(PIECES), settings), "abc") == ["a", "bc"]


def test_added_tokens_get_their_ids(tmp_path: Path) -> None:
    """Chat models extend the vocabulary in tokenizer_config.json alone."""
    added = {"265": {"content": "<|im_end|>", "special": True}, "1": {"content": "<s>"}}
    tokenizer = opened(
        tmp_path, model_file(PIECES), {"added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    )
    assert tokenizer.token(265) == "<|im_end|>"
    assert tokenizer.is_special(265)
    assert tokenizer.eos_ids == (265,)


@pytest.mark.parametrize(("legacy", "after"), [(True, "▁a"), (False, "a")])
def test_legacy_says_whether_a_space_follows_a_control_token(
    tmp_path: Path, legacy: bool, after: str
) -> None:
    """As LlamaTokenizer of transformers: one token's difference in every turn of a chat."""
    import tokenizers

    opened(tmp_path, model_file(PIECES), {"legacy": legacy})
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode("a</s>a", add_special_tokens=False).tokens == ["▁a", "</s>", after]


UNFIT = {
    "unigram": (model_file(PIECES, trainer=whole(3, 1)), {}, "unigram"),
    "charsmap": (model_file(PIECES, normalizer=data(2, b"x")), {}, "precompiled_charsmap"),
    "spaces": (model_file(PIECES, normalizer=whole(4, 1)), {}, "remove_extra_whitespaces"),
    "class": (model_file(PIECES), {"tokenizer_class": "T5Tokenizer"}, "T5Tokenizer"),
    "flags": (
        model_file(PIECES),
        {"added_tokens_decoder": {"265": {"content": "<x>", "lstrip": True}}},
        "lstrip",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_converted_exactly_is_refused(tmp_path: Path, name: str) -> None:
    """A nearly right tokenizer fails in silence."""
    model, settings, named = UNFIT[name]
    with pytest.raises(ConfigError, match=named):
        opened(tmp_path, model, settings)


@pytest.mark.parametrize("cut", [0, 1, 7, 100, 3000])
def test_a_cut_model_is_refused(tmp_path: Path, cut: int) -> None:
    with pytest.raises(CheckpointError):
        opened(tmp_path, model_file(PIECES)[:cut])


def test_a_converted_model_agrees_with_sentencepiece(shared: Path, tmp_path: Path) -> None:
    """The reference ids are SentencePiece's own."""
    import gguf

    golden = shared / "golden/tokenizers/llama-spm"
    fields = gguf.GGUFReader(golden.with_suffix(".gguf")).fields
    tokens, scores, types = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type")
    )
    model = model_file(zip(tokens, scores, types, strict=True))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(model)
    for name, content in hf_texts(folder, len(tokens)).items():
        (tmp_path / name).write_bytes(content)
    tokenizer = Tokenizer.open(tmp_path)
    cases = json.loads(golden.with_suffix(".json").read_text())
    for case in cases["cases"] if isinstance(cases, dict) else cases:
        assert tokenizer.encode(case["text"])[1:] == case["ids"], case["text"]
