"""What cannot be exported exactly is refused in one sentence, before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llama import Shape, write_tiny_gguf

from ortolan.errors import BundleError, CheckpointError, ConfigError, OrtolanError, UsageError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.gguf_reader import GgufCheckpoint

NAN, INF = float("nan"), float("inf")
NORM = np.ones(64, np.float32)

# Arguments of write_tiny_gguf, the error's class, and what its message must name.
CASES: dict[str, tuple[dict[str, Any], type[OrtolanError], list[str]]] = {
    "architecture": ({"architecture": "gpt2"}, ConfigError, ["'gpt2'", "'llama'"]),
    "unknown-rope": (
        {"override": {"llama.rope.scaling.type": "dynamic"}},
        ConfigError,
        ["llama.rope.scaling.type", "'dynamic'"],
    ),
    "rope-base-of-one": (
        {"override": {"llama.rope.freq_base": 1.0}},
        CheckpointError,
        ["llama.rope.freq_base", "1.0"],
    ),
    "longrope-without-factors": (
        {"override": {"llama.rope.scaling.type": "longrope"}},
        CheckpointError,
        ["rope_factors_short.weight", "missing"],
    ),
    "rope-of-no-factor": (
        {"override": {"llama.rope.scaling.type": "linear"}},
        CheckpointError,
        ["llama.rope.scaling.factor", "missing"],
    ),
    "experts": ({"override": {"llama.expert_count": 8}}, ConfigError, ["llama.expert_count", "8"]),
    "unknown-setting": (
        {"override": {"llama.attention.temperature_scale": 4096}},
        ConfigError,
        ["llama.attention.temperature_scale", "4096"],
    ),
    "value-length": (
        {"override": {"llama.attention.value_length": 32}},
        ConfigError,
        ["llama.attention.value_length", "32", "16"],
    ),
    "partial-rotary": (
        {"override": {"llama.rope.dimension_count": 8}},
        ConfigError,
        ["llama.rope.dimension_count", "8", "16"],
    ),
    "type-q8-1": (  # a format of activations
        {"types": {"blk.1.ffn_down*": "Q8_1"}},
        ConfigError,
        ["blk.1.ffn_down.weight", "Q8_1", "Q4_1"],
    ),
    "quantized-norm": (
        {"types": {"output_norm*": "Q8_0"}},
        ConfigError,
        ["output_norm.weight", "Q8_0", "F32"],
    ),
    "split-without-its-name": (
        {"override": {"split.count": 3}},
        CheckpointError,
        ["one of 3 files", "NAME-00001-of-00003.gguf"],
    ),
    "split-into-nonsense": (
        {"override": {"split.count": [3] * 100}},
        CheckpointError,
        ["split.count"],
    ),
    "no-embedding": (
        {"drop": ["token_embd.weight"]},
        CheckpointError,
        ["token_embd.weight", "missing"],
    ),
    "no-layer-weight": (
        {"drop": ["blk.1.attn_k.weight"]},
        CheckpointError,
        ["blk.1.attn_k.weight", "missing"],
    ),
    "rope-freqs": (
        {"extra": {"rope_freqs.weight": np.ones(16, np.float32)}},
        CheckpointError,
        ["rope_freqs.weight", "8 numbers above 0"],
    ),
    "bias-of-q-alone": (
        {"extra": {"blk.0.attn_q.bias": NORM}},
        CheckpointError,
        ["blk.0.attn_k.bias", "missing"],
    ),
    "bias-of-a-norm": (
        {"extra": {"blk.0.attn_norm.bias": NORM}},
        ConfigError,
        ["blk.0.attn_norm.bias", "unknown"],
    ),
    "layer-too-many": (
        {"override": {"llama.block_count": 1}},
        ConfigError,
        ["blk.1.", "unknown"],
    ),
    "layer-too-few": ({"override": {"llama.block_count": 3}}, CheckpointError, ["blk.2."]),
    "layers-without-end": (
        {"override": {"llama.block_count": 100_000}},
        CheckpointError,
        ["100000", "layers"],
    ),
    "wrong-shape": (
        {"extra": {"blk.0.ffn_up.weight": np.zeros((96, 32), np.float32)}},
        CheckpointError,
        ["blk.0.ffn_up.weight", "[96, 32]", "[96, 64]"],
    ),
    "wrong-norm-shape": (
        {"extra": {"blk.0.attn_norm.weight": np.zeros(63, np.float32)}},
        CheckpointError,
        ["blk.0.attn_norm.weight", "[63]", "[64]"],
    ),
    "transposed": (
        {"extra": {"blk.0.ffn_up.weight": np.zeros((64, 96), np.float32)}},
        CheckpointError,
        ["blk.0.ffn_up.weight"],
    ),
    "vocabulary-size": ({"override": {"llama.vocab_size": 301}}, CheckpointError, ["token_embd"]),
    "more-tokens-than-rows": (
        {"shape": Shape(vocab=290)},
        CheckpointError,
        ["300 tokens", "290"],
    ),
    "heads-do-not-divide": (
        {"override": {"llama.attention.head_count_kv": 3}},
        CheckpointError,
        ["4 attention heads", "3 key-value heads"],
    ),
    "more-kv-heads": (
        {"override": {"llama.attention.head_count_kv": 8}},
        CheckpointError,
        ["4 attention heads", "8 key-value heads"],
    ),
    "odd-head": ({"shape": Shape(head_dim=15)}, ConfigError, ["head size 15", "16"]),
    "small-head": ({"shape": Shape(head_dim=24)}, ConfigError, ["head size 24", "16"]),
    "no-tokenizer": (
        {"override": {"tokenizer.ggml.tokens": None}},
        CheckpointError,
        ["tokenizer.ggml.tokens"],
    ),
    "unknown-tokenizer": (
        {"override": {"tokenizer.ggml.pre": "mystery"}},
        ConfigError,
        ["tokenizer.ggml.pre", "'mystery'"],
    ),
    "tokenizer-of-another-kind": (
        {"override": {"tokenizer.ggml.pre": ["smollm"]}},
        ConfigError,
        ["tokenizer.ggml.pre", "['smollm']"],
    ),
    "end-token-beyond": (
        {"override": {"tokenizer.ggml.eos_token_id": 300}},
        CheckpointError,
        ["tokenizer.ggml.eos_token_id", "300"],
    ),
    "endless-context": (
        {"override": {"llama.context_length": 2**20 + 1}},
        ConfigError,
        ["1,048,577", "--max-context"],
    ),
    "nan-in-float-weights": (
        {"extra": {"blk.1.attn_norm.weight": np.full(64, NAN, np.float32)}},
        CheckpointError,
        ["blk.1.attn_norm.weight", "not finite"],
    ),
}
for _key in (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
):
    for _value in (0, -1, NAN, INF, "two", True, 1.5, [64, 64]):
        if _value == 1.5 and _key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
            continue  # what these may be
        CASES[f"{_key}={_value}"] = (
            {"override": {f"llama.{_key}": _value}},
            CheckpointError,
            [f"llama.{_key}"],
        )
for _key in (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
):
    CASES[f"no-{_key}"] = ({"override": {f"llama.{_key}": None}}, CheckpointError, [_key])


def refused(source: Path, kind: type[OrtolanError], target: Path, **options: Any) -> str:
    """The message; nothing may have been written, and it has to be one plain sentence."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(kind) as caught:
        export_bundle(str(source), target, ExportOptions(**options))
    assert type(caught.value) is kind
    assert sorted(target.parent.iterdir()) == before
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.mark.parametrize("name", CASES)
def test_unfit_checkpoints_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Ignoring any of these would give a model that answers, wrongly."""
    arguments, kind, words = CASES[name]
    source = write_tiny_gguf(tmp_path / "model.gguf", **arguments)
    message = refused(source, kind, tmp_path / "bundle")
    assert "model.gguf" in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("kind", "at"), [("F16", 0), ("BF16", 0), ("Q4_0", 0), ("Q4_1", 2), ("Q8_0", 0)]
)
def test_infinite_weights_are_refused(tmp_path: Path, kind: str, at: int) -> None:
    """One infinite scale makes every logit NaN."""
    source = write_tiny_gguf(tmp_path / "model.gguf", types=kind)
    tensor = GgufCheckpoint(source)._stored["blk.1.ffn_down.weight"]
    infinity = b"\x80\x7f" if kind == "BF16" else b"\x00\x7c"
    data = bytearray(source.read_bytes())
    data[tensor.data_offset + at : tensor.data_offset + at + 2] = infinity
    source.write_bytes(data)
    message = refused(source, CheckpointError, tmp_path / "bundle")
    assert "blk.1.ffn_down.weight" in message
    assert "not finite" in message


@pytest.mark.parametrize(
    "content", [b"", b"G", b"GGUF", b"GGML" + bytes(100), b"GGUF" + bytes(100)], ids=repr
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """Someone gives the wrong file, or a download that never began."""
    source = tmp_path / "model.gguf"
    source.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf: "):
        export_bundle(str(source), tmp_path / "bundle", ExportOptions())
    assert list(tmp_path.iterdir()) == [source]


def test_missing_files_folders_and_names_are_refused(tmp_path: Path) -> None:
    """The first thing that goes wrong for anyone."""
    assert "no such file" in refused(tmp_path / "absent.gguf", CheckpointError, tmp_path / "out")
    assert "config.json" in refused(tmp_path, CheckpointError, tmp_path / "out")
    with pytest.raises(CheckpointError, match="one of: smollm2"):
        export_bundle("smolm2", tmp_path / "out", ExportOptions())


def test_a_big_endian_file_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    """Its blocks would be read with swapped bytes, into plausible nonsense."""
    data = bytearray(tiny_gguf.read_bytes())
    data[4:8] = data[4:8][::-1]
    source = tmp_path / "model.gguf"
    source.write_bytes(data)
    assert "big-endian" in refused(source, ConfigError, tmp_path / "bundle")
    data[4:8] = (9).to_bytes(4, "little")
    source.write_bytes(data)
    assert "version 9" in refused(source, ConfigError, tmp_path / "bundle")


def test_a_file_cut_short_anywhere_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    """An interrupted download has to be seen before its missing tail is used."""
    data = tiny_gguf.read_bytes()
    first = min(t.data_offset for t in GgufCheckpoint(tiny_gguf)._stored.values())
    cuts = {*range(4, 64), *range(64, first, 37), *range(first - 40, first + 40)}
    cuts |= {*range(first, len(data), 997), *range(len(data) - 64, len(data))}
    source = tmp_path / "model.gguf"
    for cut in sorted(cuts):
        source.write_bytes(data[:cut])
        message = refused(source, CheckpointError, tmp_path / "bundle")
        assert "cut short" in message, cut
        if cut > first:
            assert f"{cut:,} bytes" in message
            assert f"{len(data):,}" in message


@pytest.mark.parametrize("value", [-1, 0, 1, 65, 10**9])
def test_max_context_out_of_range_is_a_usage_error(
    tiny_gguf: Path, tmp_path: Path, value: int
) -> None:
    """A longer context than the model was made for is nonsense, not a warning."""
    message = refused(tiny_gguf, UsageError, tmp_path / "bundle", max_context=value)
    assert "--max-context" in message
    assert "2 to 64" in message


def test_max_context_helps_where_the_checkpoint_claims_too_much(tmp_path: Path) -> None:
    """The remedy that the refusal names has to work."""
    source = write_tiny_gguf(tmp_path / "model.gguf", override={"llama.context_length": 2**20 + 1})
    refused(source, ConfigError, tmp_path / "bundle")
    export_bundle(str(source), tmp_path / "bundle", ExportOptions(max_context=16))


def make_bundle(target: Path) -> None:
    target.mkdir()
    (target / "manifest.json").write_text("{}")
    (target / "decode.onnx").write_text("old")


def make_folder_of_files(target: Path) -> None:
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")


def make_file(target: Path) -> None:
    target.write_text("a file")


def make_symlink(target: Path) -> None:
    elsewhere = target.with_name("elsewhere")
    make_bundle(elsewhere)
    target.symlink_to(elsewhere)


def make_dangling_symlink(target: Path) -> None:
    target.symlink_to(target.with_name("nowhere"))


@pytest.mark.parametrize(
    ("make", "force", "words"),
    [
        (make_bundle, False, "--force"),
        (make_folder_of_files, False, "no part of a bundle"),
        (make_folder_of_files, True, "no part of a bundle"),
        (make_file, False, "not a folder"),
        (make_file, True, "not a folder"),
        (make_symlink, True, "not a folder"),
        (make_dangling_symlink, True, "not a folder"),
    ],
)
def test_a_target_that_exists_is_left_alone(
    tiny_gguf: Path, tmp_path: Path, make: Callable[[Path], None], force: bool, words: str
) -> None:
    """A slip in the target's name must not cost anybody's files, --force or not."""
    target = tmp_path / "bundle"
    make(target)

    def state() -> list[tuple[str, bytes]]:
        return [
            (str(path), path.read_bytes() if path.is_file() else b"")
            for path in sorted(tmp_path.rglob("*"))
        ]

    before = state()
    assert words in refused(tiny_gguf, BundleError, target, force=force)
    assert state() == before


def test_an_empty_folder_is_a_free_target(tiny_gguf: Path, tmp_path: Path) -> None:
    """People make the folder first."""
    (tmp_path / "bundle").mkdir()
    export_bundle(str(tiny_gguf), tmp_path / "bundle", ExportOptions())
    assert (tmp_path / "bundle/manifest.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_force_replaces_a_bundle_and_leaves_nothing_of_it(tiny_gguf: Path, tmp_path: Path) -> None:
    """A graph of the old one beside weights of the new one would be a half bundle."""
    make_bundle(tmp_path / "bundle")
    packed = tmp_path / "bundle" / ".packed" / "key"
    packed.mkdir(parents=True)
    export_bundle(str(tiny_gguf), tmp_path / "bundle", ExportOptions(force=True))
    assert not packed.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    shutil.rmtree(tmp_path / "bundle")
