"""The text that weights are calibrated on: shipped or given, and what is wrong with it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from tiny_hf import tokenizer_json

from ortolan.errors import CheckpointError, OrtolanError, UsageError
from ortolan.export.calibration_text import calibration_text, calibration_windows

VOCAB = 300
TEXTS = {"tokenizer.json": json.dumps(tokenizer_json()).encode()}


def windows(text: str, context: int = 64, texts: dict[str, bytes] = TEXTS) -> np.ndarray:
    return calibration_windows(text, texts, context, VOCAB, "the text")


def test_shipped_text_is_long_enough_and_not_the_one_that_is_measured_on() -> None:
    """An accuracy report on the text of the calibration would praise what was fitted to it."""
    text = calibration_text(None)
    assert len(windows(text, 4096)) == 32
    for file in ("heldout.txt", "heldout_code.txt", "heldout_scripts.txt"):
        held_out = (resources.files("ortolan") / file).read_text(encoding="utf-8")
        long_lines = [line for line in held_out.splitlines() if len(line) > 30]
        assert not [line for line in long_lines if line in text]


def test_windows_are_whole_and_spread_over_a_long_text() -> None:
    """The first pages of a book are about its printing; no window may be padded."""
    text = "".join(chr(ord("a") + i * 26 // 100_000) for i in range(100_000))
    found = windows(text)
    assert found.shape == (256, 64)
    assert len(np.unique(found)) == 26
    assert windows("b" * 1500, 2048).shape == (2, 512)


def test_begin_token_is_in_every_window() -> None:
    """Where a model expects it, a window without it has other statistics throughout."""
    values = tokenizer_json()
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }
    found = windows("abc" * 500, texts={"tokenizer.json": json.dumps(values).encode()})
    assert (found[:, 0] == 0).all()
    assert (found[:, 1:] > 2).all()


def test_control_tokens_in_the_text_are_text() -> None:
    """A text about chat templates must not begin a turn."""
    assert windows("<|im_start|>" * 200).min() > 2


@pytest.mark.parametrize(
    ("text", "texts", "error", "said"),
    [
        ("", TEXTS, UsageError, "the text is too short .* 0 tokens"),
        ("a" * 1023, TEXTS, UsageError, "1023 tokens, and 1024 are the fewest"),
        ("a" * 2000, {}, CheckpointError, "no tokenizer"),
    ],
)
def test_what_cannot_be_calibrated_with_is_refused(
    text: str, texts: dict[str, bytes], error: type[OrtolanError], said: str
) -> None:
    """Statistics of a handful of tokens would make weights worse, and nobody would notice."""
    with pytest.raises(error, match=said):
        windows(text, texts=texts)


def test_ids_beyond_the_model_are_refused() -> None:
    """They would be looked up in another row of the table."""
    with pytest.raises(CheckpointError, match="the model has 50 ids"):
        calibration_windows("z" * 2000, TEXTS, 64, 50, "the text")


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    """One sentence with the option's name, not a traceback."""
    with pytest.raises(UsageError, match=r"--calibrate .*none\.txt: cannot be read"):
        calibration_text(tmp_path / "none.txt")
    with pytest.raises(UsageError, match="cannot be read"):
        calibration_text(tmp_path)
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UsageError, match=r"not UTF-8 text \(byte 3\)"):
        calibration_text(tmp_path / "latin.txt")


def test_no_character_is_lost_where_a_huge_file_is_cut(tmp_path: Path) -> None:
    """The limit may fall into the middle of a character."""
    (tmp_path / "huge.txt").write_text("a" + "é" * (5 << 20), encoding="utf-8")
    assert set(calibration_text(tmp_path / "huge.txt")) == {"a", "é"}
