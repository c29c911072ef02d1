"""Every architecture against Hugging Face transformers, and against formulas written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_runner import GraphRunner, relative_error
from reference_hf import ReferenceHf
from tiny_hf import config, write_folder

from ortolan.export.exporter import AttentionChoice, ExportOptions, export_bundle

TOLERANCE = 1e-4
FLAVORS: tuple[AttentionChoice, ...] = ("gqa", "onnx")
IDS = [2, 299, 7, 7, 120, 45, 0, 200, 31, 288, 5, 64, 17, 290, 99, 3, 150, 12, 77, 8]
NAMES = (
    "granite",
    "llama3_rope_scaled",
    "llama_head_dim",
    "llama_linear_rope_bias",
    "llama_mha_tied",
    "mistral_window",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)


# Made by tests/make_arch_references.py, of the same form.
OWN = Path(__file__).parents[1] / "data" / "arch"
OWN_NAMES = sorted(folder.name for folder in OWN.iterdir())


def test_every_golden_folder_is_in_the_list(shared: Path) -> None:
    """A checkpoint added there must not go unchecked here."""
    assert sorted(folder.name for folder in (shared / "golden/arch").iterdir()) == list(NAMES)


@pytest.mark.parametrize("attention", FLAVORS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_checkpoints_give_the_logits_of_transformers(
    shared: Path, tmp_path: Path, name: str, attention: AttentionChoice
) -> None:
    """A model that runs but computes something else is the worst that an export can do."""
    check(shared / "golden/arch" / name, tmp_path, ExportOptions(attention=attention))


@pytest.mark.parametrize("attention", FLAVORS)
@pytest.mark.parametrize("name", OWN_NAMES)
def test_our_own_checkpoints_give_the_logits_of_transformers(
    tmp_path: Path, name: str, attention: AttentionChoice
) -> None:
    """Families and kinds of rope that the golden folders do not have."""
    check(OWN / name, tmp_path, ExportOptions(attention=attention))


@pytest.mark.parametrize("attention", FLAVORS)
def test_a_long_text_has_the_long_factors_of_transformers(
    tmp_path: Path, attention: AttentionChoice
) -> None:
    """Beyond the original context, transformers turns every position by the long ones."""
    options = ExportOptions(attention=attention, max_context=128)
    check(OWN / "phi3_longrope", tmp_path, options, "expected_long.npz")


def check(source: Path, tmp_path: Path, options: ExportOptions, file: str = "expected.npz") -> None:
    """Logits of a whole prompt, of its second half after its first, and a greedy continuation."""
    export_bundle(str(source), tmp_path / "bundle", options)
    expected = np.load(source / file)
    ids, logits = expected["input_ids"].reshape(-1).tolist(), expected["logits"]

    runner = GraphRunner(tmp_path / "bundle")
    whole = runner.logits(ids)
    assert relative_error(whole, logits) < TOLERANCE
    greedy = runner.greedy(int(whole[-1].argmax()), len(ids), len(expected["greedy_ids"]))
    assert greedy == expected["greedy_ids"].tolist()
    for graph in ("prefill", "prefill_ragged"):
        cut = len(ids) // 2
        runner.logits(ids[:cut], graph=graph)
        assert relative_error(runner.logits(ids[cut:], cut, graph), logits[cut:]) < TOLERANCE


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": config(),
    "one-key-value-head": config(num_key_value_heads=1),
    "as-many-key-value-heads": config(num_key_value_heads=4, tie_word_embeddings=True),
    "biases": config(attention_bias=True, mlp_bias=True),
    "wide-heads": config(head_dim=48, num_attention_heads=2, num_key_value_heads=1),
    "linear": config(rope_scaling={"type": "linear", "factor": 2.5}),
    "llama3": config(rope_scaling=LLAMA3, rope_theta=50000.0),
    "yarn": config("qwen2", rope_scaling=YARN),
    "yarn-bounds": config(rope_scaling={**YARN, "beta_fast": 4, "beta_slow": 2, "type": "yarn"}),
    "longrope": config("phi3", original_max_position_embeddings=32, rope_scaling=LONGROPE),
    "partial-rotary": config("phi3", head_dim=32, partial_rotary_factor=0.5),
    "window": config("mistral", sliding_window=5),
    "window-in-late-layers": config(
        "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "window-in-listed-layers": config(
        "qwen3",
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "head-norms": config("qwen3"),
    "no-rope-layers": config("smollm3", no_rope_layers=[0, 1], tie_word_embeddings=True),
    "multipliers": config("granite"),
    "fused": config("phi3", sliding_window=6),
}


@pytest.mark.parametrize("attention", FLAVORS)
@pytest.mark.parametrize("name", MODELS)
def test_what_families_differ_in_follows_the_formulas(
    tmp_path: Path, name: str, attention: AttentionChoice
) -> None:
    """The same without reference results at hand, and for settings that they do not cover."""
    source = write_folder(tmp_path / name, MODELS[name])
    export_bundle(str(source), tmp_path / "bundle", ExportOptions(attention=attention))
    expected = ReferenceHf(source).logits(IDS)
    runner = GraphRunner(tmp_path / "bundle")
    assert relative_error(runner.logits(IDS), expected) < TOLERANCE
    runner.logits(IDS[:7])
    for position, token in enumerate(IDS[7:], start=7):
        last = runner.logits([token], position, "decode")
    assert relative_error(last, expected[-1:]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_half_precision_is_kept_and_computed_in_float32(
    tmp_path: Path, family: str, dtype: str
) -> None:
    """Two bytes a weight on disk, and the values that the file has."""
    source = write_folder(tmp_path / "model", config(family), dtype=dtype, shards=3)
    manifest = export_bundle(str(source), tmp_path / "bundle", ExportOptions())
    kinds = {group.precision for group in manifest.weights if group.role in ("attention", "mlp")}
    assert kinds == {dtype}
    found = GraphRunner(tmp_path / "bundle").logits(IDS)
    assert relative_error(found, ReferenceHf(source).logits(IDS)) < TOLERANCE


def test_a_long_context_takes_the_long_factors(tmp_path: Path) -> None:
    """Longrope has two models in one; --max-context says which."""
    values = config("phi3", original_max_position_embeddings=32, rope_scaling=LONGROPE)
    source = write_folder(tmp_path / "model", values)
    short = export_bundle(str(source), tmp_path / "short", ExportOptions()).model
    long = export_bundle(str(source), tmp_path / "long", ExportOptions(max_context=48)).model
    assert (short.max_context, short.rope_divisors) == (32, LONGROPE["short_factor"])
    assert (long.max_context, long.rope_divisors) == (48, LONGROPE["long_factor"])
    assert short.rope_magnitude == long.rope_magnitude > 1
