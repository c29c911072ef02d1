"""Text that grows token by token: whole characters only, and in sum the decoded text."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortolan.runtime.text.detokenizer import Detokenizer
from ortolan.runtime.text.tokenizer import Tokenizer

same_tokenizer = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def pushed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(index) for index in ids), detokenizer.flush()]


@same_tokenizer
@given(text=st.text(alphabet="ab é日\U0001f642\U0001f469\u200d\n"))
def test_pieces_of_a_text_are_whole_characters(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    """Half a character on a screen is a replacement sign that never goes away (llama.cpp#4036)."""
    for tokenizer in (byte_level, sentencepiece):
        pieces = pushed(tokenizer, tokenizer.encode(text))
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text


@same_tokenizer
@given(ids=st.lists(st.integers(0, 280), max_size=40))
def test_pieces_of_any_ids_add_up_to_the_decoded_text(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ids: list[int]
) -> None:
    """A model may emit any bytes; streaming and not must show the same."""
    for tokenizer in (byte_level, sentencepiece):
        assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids)


def test_character_appears_with_its_last_token(byte_level: Tokenizer) -> None:
    """Held back no longer than needed."""
    assert pushed(byte_level, byte_level.encode("日a")) == ["", "", "日", "a", ""]


def test_incomplete_character_at_the_end_is_shown_as_such(byte_level: Tokenizer) -> None:
    """An answer cut at max_tokens must not hide that something was there."""
    assert pushed(byte_level, byte_level.encode("日")[:2]) == ["", "", "\ufffd"]


def test_special_token_inside_a_character_shows_nothing(byte_level: Tokenizer) -> None:
    first, *others = byte_level.encode("日")
    assert pushed(byte_level, [first, 1, *others]) == ["", "", "", "日", ""]


def test_leading_space_goes_once(sentencepiece: Tokenizer) -> None:
    """SentencePiece's own space is not the model's; a second one is."""
    ids = sentencepiece.encode(" ab ab")
    assert "".join(pushed(sentencepiece, ids)) == " ab ab"
    word = sentencepiece.encode("ab")[-1]
    assert pushed(sentencepiece, [word, word]) == ["ab", " ab", ""]


def test_continued_prompt_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    """A completion of "the" by " end" must not read "theend"."""
    word = sentencepiece.encode("ab")[-1]
    assert Detokenizer(sentencepiece, continues=True).push(word) == " ab"
