"""Shards, tied heads, spellings: what of a Hugging Face folder is read, and what must agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_hf import config, random_tensors, write_folder

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.hf_reader import HfCheckpoint


def refusal(source: Path, kind: type[Exception] = CheckpointError, **options: Any) -> str:
    """The message with which an export refuses `source`; nothing may be left of it."""
    target = source.parent / "out" / "bundle"
    target.parent.mkdir()
    with pytest.raises(kind) as caught:
        export_bundle(str(source), target, ExportOptions(**options))
    assert list(target.parent.iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", shards=3)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


NAMED = "model.norm.weight"


def test_a_missing_shard_is_named(sharded: Path) -> None:
    """A download that stopped between two files looks complete otherwise."""
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(sharded)


def test_a_shard_that_the_index_does_not_list_is_named(sharded: Path) -> None:
    """Two versions of a checkpoint in one folder, or an adapter, make it unclear what is meant."""
    (sharded / "adapter_model.safetensors").write_bytes(
        (sharded / "model-00001-of-00003.safetensors").read_bytes()
    )
    assert "adapter_model.safetensors is not listed" in refusal(sharded)


def test_files_beside_a_single_one_are_named(tmp_path: Path) -> None:
    """The same without an index."""
    source = write_folder(tmp_path / "model")
    (source / "adapter_model.safetensors").write_bytes(b"")
    assert "adapter_model.safetensors lies beside" in refusal(source)


def test_a_tensor_placed_elsewhere_by_the_index_is_named(sharded: Path) -> None:
    """The files may be of two versions."""
    other = "model-00001-of-00003.safetensors"
    edit_index(sharded, lambda places: places.update({NAMED: other}))
    message = refusal(sharded)
    assert NAMED in message
    assert "elsewhere" in message


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    """Which of the two counts would depend on the order of reading."""
    import safetensors.numpy

    name = "model-00001-of-00003.safetensors"
    tensors = safetensors.numpy.load_file(sharded / name)
    tensors["model.embed_tokens.weight"] = np.zeros((300, 64), np.float32)
    tensors[NAMED] = np.zeros(64, np.float32)
    safetensors.numpy.save_file(tensors, sharded / name)
    assert "places elsewhere" in refusal(sharded)


def test_a_tensor_only_in_the_index_is_named(sharded: Path) -> None:
    edit_index(
        sharded,
        lambda places: places.update({"lm_head.bias": "model-00001-of-00003.safetensors"}),
    )
    assert "tensor lm_head.bias is missing" in refusal(sharded)


def test_an_index_may_not_point_out_of_its_folder(sharded: Path) -> None:
    """A checkpoint from a stranger must not read other files."""
    edit_index(sharded, lambda places: places.update({NAMED: "../other.safetensors"}))
    assert "'../other.safetensors' is not a file name" in refusal(sharded)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """JSON leaves open which of the two counts."""
    source = write_folder(tmp_path / "model")
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(text[:-1] + ', "rope_theta": 5.0}')
    assert "'rope_theta' is there twice" in refusal(source)


def test_a_folder_without_safetensors_says_so(tmp_path: Path) -> None:
    """Pickled weights run code when they are opened."""
    source = write_folder(tmp_path / "model")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "only safetensors are read" in refusal(source)


def test_a_tied_head_stored_twice_is_read_once(tmp_path: Path) -> None:
    """Some tools save the shared table under both names."""
    values = config(tie_word_embeddings=True)
    tensors = random_tensors(values)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    source = write_folder(tmp_path / "model", values, tensors, shards=2)
    assert HfCheckpoint(source).config.tie_embeddings


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    """A fine-tuned head would be dropped in silence."""
    values = config(tie_word_embeddings=True)
    tensors = random_tensors(values)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][299, 63] += 1e-3
    message = refusal(write_folder(tmp_path / "model", values, tensors), ConfigError)
    assert "lm_head.weight is not model.embed_tokens.weight" in message


OLD_AND_NEW = {
    "default": ({"rope_theta": 5000.0}, {"rope_theta": 5000.0, "rope_type": "default"}),
    "linear": (
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0},
    ),
    "yarn": (
        {
            "rope_theta": 5000.0,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            },
        },
        {
            "rope_theta": 5000.0,
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    ),
}


@pytest.mark.parametrize("kind", OLD_AND_NEW)
def test_old_and_new_spelling_of_rope_mean_the_same(tmp_path: Path, kind: str) -> None:
    """Most checkpoints were written before transformers 5."""
    old, new = OLD_AND_NEW[kind]
    shapes = [
        HfCheckpoint(write_folder(tmp_path / name, values)).config
        for name, values in (
            ("old", config(**old)),
            ("new", config(rope_theta=None, rope_parameters=new)),
        )
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0].rope_theta == 5000.0


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    """What real checkpoints of these families carry along, SmolLM2's and SmolLM3's among them."""
    harmless = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "pretraining_tp": 2,
        "transformers.js_config": {"dtype": "q4"},
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "attention_dropout": 0.1,
        "rope_scaling": None,
    }
    values = {**config(), **harmless}
    assert HfCheckpoint(write_folder(tmp_path / "model", values)).config.num_layers == 2


def test_reading_leaves_no_file_open(tmp_path: Path) -> None:
    """A mapped checkpoint could not be deleted on Windows, and would keep its pages elsewhere."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux's /proc to see what is mapped")
    checkpoint = HfCheckpoint(write_folder(tmp_path / "model", shards=2))
    weight = checkpoint.read("model.layers.0.mlp.up_proj")
    assert str(tmp_path) in maps.read_text()
    del weight
    assert str(tmp_path) not in maps.read_text()


def test_shards_in_any_number_give_the_same_weights(tmp_path: Path) -> None:
    tensors = random_tensors(config())
    one, many = (
        HfCheckpoint(write_folder(tmp_path / str(n), config(), tensors, shards=n)) for n in (1, 4)
    )
    for name in one.formats:
        assert np.array_equal(one.read(name).codes, many.read(name).codes)


def test_mistrals_second_copy_is_left_alone(tmp_path: Path) -> None:
    """Its repositories hold the same weights once more as consolidated.safetensors."""
    source = write_folder(tmp_path / "model", shards=2)
    (source / "consolidated.safetensors").write_bytes(b"not looked at")
    assert HfCheckpoint(source).config.num_layers == 2
