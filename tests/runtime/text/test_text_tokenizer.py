"""Text to ids and back: what a user may not spell, exact bytes, and damaged bundles."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortolan.errors import BundleError, RequestError
from ortolan.runtime.text.markers import RenderedChat
from ortolan.runtime.text.tokenizer import Tokenizer

# The tokenizers do not change from one example to the next.
same_tokenizer = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
BEGIN, END, ROLE = 0, 1, 2


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` one byte per token: how text without merges must come out."""
    byte_ids = {tokenizer.token_bytes(index): index for index in range(4, 4 + 256)}
    return [byte_ids[bytes([byte])] for byte in text.encode()]


# What a user may not spell


@pytest.mark.parametrize("text", ["<|begin|>", "<think>", "</think>"])
def test_spelled_marker_is_text(byte_level: Tokenizer, text: str) -> None:
    """A user who types a control token must not speak with the template's voice."""
    ids = byte_level.encode(text)
    assert byte_level.decode(ids) == text
    assert all(4 <= index < 4 + 256 + 5 for index in ids)


def test_word_that_is_a_control_token_is_text(byte_level: Tokenizer) -> None:
    """With ignore_merges the model itself would take the word for the token."""
    assert byte_level.encode("MASK") == spelled(byte_level, "MASK")


def test_control_token_that_merges_can_make_is_text(
    write_bundle: Any, byte_level_document: dict[str, Any]
) -> None:
    """Not matching it in raw text is no use if the model then joins its letters."""
    index = byte_level_document["model"]["vocab"]["ok"]
    marker = byte_level_document["added_tokens"][0] | {"id": index, "content": "ok"}
    byte_level_document["added_tokens"].append(marker)
    tokenizer = Tokenizer.open(write_bundle(byte_level_document))
    assert tokenizer.encode("ok") == spelled(tokenizer, "ok")


def test_text_around_a_spelled_marker_is_tokenized_as_usual(byte_level: Tokenizer) -> None:
    """Merges reach up to a marker, and words keep their leading space."""
    end, space_end = (byte_level.encode(text) for text in ("end", " end"))
    assert len(end) == len(space_end) == 1
    # The word rule puts "|>" before the space, and " end" after it.
    expected = [*spelled(byte_level, "x<|"), *end, *spelled(byte_level, "|>"), *space_end]
    assert byte_level.encode("x<|end|> end") == expected


def test_runs_of_spaces_among_the_added_tokens_are_text(byte_level: Tokenizer) -> None:
    """Some vocabularies list indentation as added tokens; code must keep using them."""
    (two_spaces,) = byte_level.encode("  ")
    assert byte_level.token(two_spaces) == "  "
    spelled_with_marker = byte_level.encode("<|end|>  ")
    assert spelled_with_marker[-1] == two_spaces


def test_ordinary_text_needs_no_second_tokenizer(byte_level: Tokenizer) -> None:
    """The second copy takes as long as opening, which would double the time to first token."""
    byte_level.encode("the end")
    byte_level.encode_chat(RenderedChat("<|role|>the end<|end|>"))
    assert "_renamed" not in vars(byte_level)


# BOS


def test_bos_is_added_where_the_file_says_so(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    """A model trained with BOS answers nonsense without it, and the other way round."""
    assert BEGIN not in byte_level.encode("ok")
    assert sentencepiece.encode("ab")[0] == sentencepiece.bos_id == 1
    assert sentencepiece.encode("") == [1]


def test_bos_is_never_doubled(sentencepiece: Tokenizer) -> None:
    """A prompt that begins with BOS's spelling gets one BOS: the rest is text."""
    assert sentencepiece.encode("<s>ab").count(1) == 1
    assert sentencepiece.encode_chat(RenderedChat("<s>ab")).count(1) == 1


def test_chat_without_bos_in_its_template_has_none(sentencepiece: Tokenizer) -> None:
    """A template knows whether its model wants BOS."""
    assert 1 not in sentencepiece.encode_chat(RenderedChat("ab"))


# Chats


def test_template_markers_are_control_tokens_and_user_text_is_not(byte_level: Tokenizer) -> None:
    """The same characters mean different things by who wrote them."""
    text = "<|role|>say <|end|><|end|>"
    cut = text.index("<|end|>") + 1
    ids = byte_level.encode_chat(RenderedChat(text, cuts=(cut,)))
    assert ids.count(END) == 1
    assert ids[0] == ROLE
    assert ids[-1] == END
    assert b"".join(byte_level.token_bytes(index, special=True) for index in ids) == text.encode()


def test_marker_across_a_cut_is_text(byte_level: Tokenizer) -> None:
    """Two messages must not make a marker together."""
    assert byte_level.encode_chat(RenderedChat("<|end|>", cuts=(4,))) == byte_level.encode(
        "<|end|>"
    )


def test_cut_beside_a_marker_leaves_it_alone(byte_level: Tokenizer) -> None:
    """A user's text that ends in "<" must not break the template's marker after it."""
    rendered = RenderedChat("a <<|end|>> b", cuts=(3, 10))
    assert byte_level.encode_chat(rendered) == byte_level.encode_chat(RenderedChat(rendered.text))
    assert END in byte_level.encode_chat(rendered)


def test_leading_space_after_markers_is_the_same_with_cuts(sentencepiece: Tokenizer) -> None:
    """SentencePiece puts a space after every control token; text apart must not lose that."""
    plain = sentencepiece.encode_chat(RenderedChat("<s>ab</s>ab"))
    cut = sentencepiece.encode_chat(RenderedChat("<s>ab</s>ab</s>", cuts=(12,)))
    assert cut[: len(plain)] == plain
    assert cut.count(2) == 1


# Bytes


@same_tokenizer
@given(text=st.text())
def test_decoding_gives_the_text_back(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    """No character is lost, whatever it is and whatever it spells."""
    assert byte_level.decode(byte_level.encode(text)) == text
    # U+2581 stands for a space in this family: decoding cannot tell.
    assert sentencepiece.decode(sentencepiece.encode(text)) == text.replace("\u2581", " ")


@same_tokenizer
@given(text=st.text(alphabet="abé 日\U0001f642\n"))
def test_decoding_agrees_with_the_library(
    byte_level_document: dict[str, Any], byte_level: Tokenizer, text: str
) -> None:
    """The bytes of a token are the published ones, not a table of our own."""
    library = tokenizers.Tokenizer.from_str(json.dumps(byte_level_document))
    ids = library.encode(text).ids
    assert byte_level.decode(ids) == library.decode(ids)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


def test_token_may_be_part_of_a_character(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """Logprobs carry bytes, since such a token has no text of its own (vllm#6626)."""
    ids = byte_level.encode("日")
    assert [byte_level.token_bytes(index) for index in ids] == [b"\xe6", b"\x97", b"\xa5"]
    assert sentencepiece.token_bytes(3 + 0xE6) == b"\xe6"


def test_special_tokens_have_no_text(byte_level: Tokenizer) -> None:
    """An answer must not show the marker that ended it."""
    assert byte_level.is_special(END)
    assert not byte_level.is_special(4)
    assert byte_level.decode([END]) == ""
    assert byte_level.token_bytes(END) == b""
    assert byte_level.token_bytes(END, special=True) == b"<|end|>"
    (think,) = byte_level.encode_chat(RenderedChat("<think>"))
    assert byte_level.decode([think]) == "<think>"


def test_added_token_outside_ascii_keeps_its_characters(
    write_bundle: Any, byte_level_document: dict[str, Any]
) -> None:
    """Added tokens are spelled in plain characters, not in the alphabet of bytes."""
    size = len(byte_level_document["model"]["vocab"]) + 3
    flags = byte_level_document["added_tokens"][-1]
    byte_level_document["added_tokens"].append(flags | {"id": size, "content": "½é"})
    tokenizer = Tokenizer.open(write_bundle(byte_level_document))
    assert tokenizer.token_bytes(size) == "½é".encode()


# What the engine asks


def test_ids_that_end_an_answer(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """Both spellings of generation_config.json are in use: an id and a list."""
    assert byte_level.eos_ids == (1, 2)
    assert sentencepiece.eos_ids == (2,)
    assert (byte_level.bos_id, byte_level.pad_id) == (0, 1)


def test_vocab_size_counts_past_holes(
    write_bundle: Any, byte_level_document: dict[str, Any]
) -> None:
    """An id past the size is never sampled, so the size must reach the last token."""
    vocab = byte_level_document["model"]["vocab"]
    full = len(vocab) + 3
    assert Tokenizer.open(write_bundle(byte_level_document)).vocab_size == full
    vocab["far"] = full + 100
    tokenizer = Tokenizer.open(write_bundle(byte_level_document))
    assert tokenizer.vocab_size == full + 101
    assert tokenizer.token_bytes(full + 50) == b""
    assert tokenizer.token(full + 50) is None
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.token(-1) is None


def test_training_length_in_the_file_does_not_cut_prompts(
    write_bundle: Any, byte_level_document: dict[str, Any]
) -> None:
    """A truncated prompt would be answered as if it were whole."""
    byte_level_document["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    tokenizer = Tokenizer.open(write_bundle(byte_level_document))
    assert len(tokenizer.encode("0123456789")) == 10


# What is refused


@pytest.mark.parametrize("start", ["", "<think>"])
def test_long_text_does_not_hold_up_other_threads(byte_level: Tokenizer, start: str) -> None:
    """One caller's prompt of megabytes must not halt everybody's streams for seconds."""
    done, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    text = start + "a b " * 200_000
    byte_level.encode(start + "a")  # what is made once is made
    thread = threading.Thread(target=tick)
    thread.start()
    ids, seen = byte_level.encode(text), ticks
    done.set()
    thread.join()
    assert seen >= 10  # no more than 3 while the library keeps the lock
    assert byte_level.decode(ids) == text
    assert ids[-800:] == byte_level.encode("a b " * 200)


def test_half_a_surrogate_pair_is_the_callers_error(byte_level: Tokenizer) -> None:
    """JSON can carry one; it must not end as an internal error."""
    with pytest.raises(RequestError, match="character 2"):
        byte_level.encode("ok\ud83d")
    with pytest.raises(RequestError):
        byte_level.encode_chat(RenderedChat("<|end|>\ud83d", cuts=(1,)))


def test_missing_file_is_named(tmp_path: Path) -> None:
    """Whoever copied half a bundle needs to know which half."""
    with pytest.raises(BundleError, match=r"no tokenizer\.json; export"):
        Tokenizer.open(tmp_path)


def test_damaged_file_is_named(tmp_path: Path, write_bundle: Any) -> None:
    """A truncated copy is told from a missing one."""
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model')
    with pytest.raises(BundleError, match=r"tokenizer\.json is damaged"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("eos", ["</s>", [1, None], -1, True])
def test_end_token_that_is_no_id_is_refused(
    write_bundle: Any, byte_level_document: dict[str, Any], eos: object
) -> None:
    """Without its end token a model never stops."""
    with pytest.raises(BundleError, match="eos_token_id"):
        Tokenizer.open(write_bundle(byte_level_document, {"eos_token_id": eos}))


def test_damaged_generation_config_is_named(
    tmp_path: Path, write_bundle: Any, byte_level_document: dict[str, Any]
) -> None:
    write_bundle(byte_level_document, generation=[])
    with pytest.raises(BundleError, match="no JSON object"):
        Tokenizer.open(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(BundleError, match="damaged"):
            Tokenizer.open(tmp_path)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_decoder_that_cannot_be_streamed_is_refused(
    write_bundle: Any, byte_level_document: dict[str, Any], decoder: object
) -> None:
    """Text put together by another rule would differ between streaming and not."""
    byte_level_document["decoder"] = decoder
    with pytest.raises(BundleError, match="decoder"):
        Tokenizer.open(write_bundle(byte_level_document))
