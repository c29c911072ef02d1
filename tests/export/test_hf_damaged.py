"""Damaged and hostile Hugging Face folders: a refusal or the right bundle, in bounded memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from damage import flip, flipped, memory_bounded, place, tried_export
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_hf import config, write_folder

from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.graphs.manifest import WEIGHTS_NAME, Manifest

WEIGHTS = "model.safetensors"
LIES: list[Any] = [
    0, -1, 1, 2, 0.5, 2**31 - 1, 2**32, 2**48, 2**63, 2**64, 10**30, 10**400, 1e300, 1e-300,
    -1e300, "x", "", "9" * 5000, True, False, None, [], [1], [[]], {}, {"a": {"b": 1}}, [0] * 2000,
]  # fmt: skip


@dataclass(frozen=True, repr=False)
class Intact:
    """The two files of a whole folder, the length of the header, and the bundle's weights."""

    weights: bytes
    config: bytes
    header_bytes: int
    hash: str

    def __repr__(self) -> str:
        return "Intact()"  # hypothesis prints it with every failure


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Intact:
    root = tmp_path_factory.mktemp("intact")
    source = write_folder(root / "model", small())
    manifest = export_bundle(str(source), root / "bundle", ExportOptions())
    weights = (source / WEIGHTS).read_bytes()
    header = 8 + struct.unpack_from("<Q", weights)[0]
    text = (source / "config.json").read_bytes()
    return Intact(weights, text, header, manifest.files[WEIGHTS_NAME].sha256)


def small() -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    return config("qwen3", num_hidden_layers=1, rope_scaling=scaling, sliding_window=8,
                  use_sliding_window=True, layer_types=["sliding_attention"])  # fmt: skip


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """What a damaged file says must not be believed when memory is taken."""
    with memory_bounded():
        yield


def try_export(weights: bytes, text: bytes) -> Manifest | str:
    """The refusal's message, or what a whole bundle says; anything else fails the test."""

    def write(folder: Path) -> Path:
        source = folder / "model"
        source.mkdir()
        (source / WEIGHTS).write_bytes(weights)
        (source / "config.json").write_bytes(text)
        return source

    return tried_export(write)


lie = st.sampled_from([json.dumps(lie) for lie in LIES])


def pick(items: Sequence[Any], at: float) -> Any:
    return items[int(at * len(items))]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(flips=st.lists(flip, min_size=1, max_size=3))
def test_flipped_bits_in_a_header_are_refused_or_change_nothing(
    intact: Intact, flips: list[tuple[float, int]]
) -> None:
    """The header says which bytes are which weight: read wrongly, they make another model."""
    found = try_export(flipped(intact.weights, flips, intact.header_bytes), intact.config)
    if isinstance(found, Manifest):
        assert found.files[WEIGHTS_NAME].sha256 == intact.hash


@settings(max_examples=60, deadline=None, derandomize=True)
@given(kept=st.floats(0, 1, exclude_max=True), near=st.booleans())
def test_cut_weights_are_refused(intact: Intact, kept: float, near: bool) -> None:
    """A download that broke off, in the header or after it."""
    length = int(kept * (intact.header_bytes if near else len(intact.weights)))
    assert isinstance(try_export(intact.weights[:length], intact.config), str)


@pytest.mark.parametrize("lie", [0, 1, 2**31, 2**48, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused(intact: Intact, lie: int) -> None:
    """It is the first thing that a reader allocates by."""
    data = struct.pack("<Q", lie) + intact.weights[8:]
    assert isinstance(try_export(data, intact.config), str)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(at=st.tuples(place, place, place), within=st.booleans(), lie=lie)
def test_lying_entries_of_the_header_are_refused_or_change_nothing(
    intact: Intact, at: tuple[float, float, float], within: bool, lie: str
) -> None:
    """Shapes, dtypes and offsets that are no such thing, or point elsewhere."""
    header = json.loads(intact.weights[8 : intact.header_bytes])
    entry = header[pick(sorted(header), at[0])]
    key = pick(sorted(entry), at[1])
    if within and isinstance(entry[key], list):
        entry[key][pick(range(len(entry[key])), at[2])] = json.loads(lie)
    else:
        entry[key] = json.loads(lie)
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + intact.weights[intact.header_bytes :]
    found = try_export(weights, intact.config)
    if isinstance(found, Manifest):
        assert found.files[WEIGHTS_NAME].sha256 == intact.hash


def test_two_tensors_may_not_share_bytes(intact: Intact) -> None:
    """Offsets that overlap would read one weight as another."""
    header = json.loads(intact.weights[8 : intact.header_bytes])
    at = "model.layers.0.input_layernorm.weight"
    other = "model.layers.0.post_attention_layernorm.weight"
    header[at]["data_offsets"] = header[other]["data_offsets"]
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + intact.weights[intact.header_bytes :]
    assert isinstance(try_export(weights, intact.config), str)


def check_says_what_it_read(found: Manifest | str, text: bytes) -> None:
    """A bundle that was written has every setting that the config has, at its value."""
    if isinstance(found, str):
        return
    read, model = json.loads(text), found.model
    assert set(read) <= set(small()) | {"hidden_dropout"}
    for key, value in {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_context,
        "vocab_size": model.vocab_size,
    }.items():
        assert read[key] == value
    assert (read.get("rope_theta") or 10000.0) == model.rope_theta
    scaling = read.get("rope_scaling") or {"rope_type": "default"}
    assert scaling.get("rope_type") in (model.rope_kind, None)
    if read.get("use_sliding_window") and read.get("sliding_window"):
        assert model.sliding_window == read["sliding_window"]
    else:
        assert model.sliding_window == 0


@settings(max_examples=120, deadline=None, derandomize=True)
@given(flips=st.lists(flip, min_size=1, max_size=2))
def test_flipped_bits_in_the_config_are_refused_or_read(
    intact: Intact, flips: list[tuple[float, int]]
) -> None:
    """A misspelled key must not become a default."""
    text = flipped(intact.config, flips, len(intact.config))
    check_says_what_it_read(try_export(intact.weights, text), text)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(at=place, inner=st.booleans(), lie=lie)
def test_lying_settings_are_refused_or_read(
    intact: Intact, at: float, inner: bool, lie: str
) -> None:
    """Numbers without end, other types, and things within things."""
    values = json.loads(intact.config)
    changed = values["rope_scaling"] if inner else values
    names = sorted(changed)
    if inner:
        names += ["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
                  "truncate", "partial_rotary_factor", "rope_theta", "type"]  # fmt: skip
    changed[pick(names, at)] = json.loads(lie)
    text = json.dumps(values).encode()
    found = try_export(intact.weights, text)
    if not inner:
        check_says_what_it_read(found, text)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"null", b"\xff\xfe", b"{" * 100_000, b'{"a":' * 100_000, b'{"a": NaN}',
     b'{"vocab_size": ' + b"9" * 5000 + b"}", b"[" * 1_000_000],
    ids=lambda text: str(text[:12]),
)  # fmt: skip
def test_what_is_no_config_is_refused(intact: Intact, text: bytes) -> None:
    """Depth without end must not exhaust the stack."""
    assert isinstance(try_export(intact.weights, text), str)


def test_names_with_control_characters_do_not_reach_the_terminal(intact: Intact) -> None:
    """A tensor's or setting's name can hold escape sequences that rewrite what was printed."""
    header = json.loads(intact.weights[8 : intact.header_bytes])
    header["\x1b[2J"] = header.pop("model.norm.weight")
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + intact.weights[intact.header_bytes :]
    assert isinstance(try_export(weights, intact.config), str)
    values = {**json.loads(intact.config), "\x1b[2J": 1}
    assert isinstance(try_export(intact.weights, json.dumps(values).encode()), str)
    values = {**json.loads(intact.config), "model_type": "\x1b[2J"}
    assert isinstance(try_export(intact.weights, json.dumps(values).encode()), str)
