"""The architectures that llama.cpp names, from GGUF to logits, against someone else's results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import llama_cpp_convert as llama_cpp
import numpy as np
import pytest
from exact_bundle import ExactBundle
from reference_llama import ReferenceLlama
from tiny_llama import write_tiny_gguf

from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.gguf_reader import GgufCheckpoint

GOLDEN = [
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
]
IDS = [2, 299, 7, 7, 120, 45, 0, 200, 31, 288, 5, 64]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def export(source: Path, **options: Any) -> ExactBundle:
    bundle = source.parent / "bundle"
    export_bundle(str(source), bundle, ExportOptions(force=True, **options))
    return ExactBundle(bundle)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_folder_in_llama_cpps_form_gives_the_golden_logits(
    shared: Path, tmp_path: Path, name: str
) -> None:
    """Names, keys, row order, fused matrices, biases, rope: each of them changes the logits."""
    folder = shared / "golden" / "arch" / name
    keys, tensors = llama_cpp.convert(folder)
    config = json.loads((folder / "config.json").read_text())
    arch = llama_cpp.architecture(config)
    if name == "mistral_window":  # which llama.cpp's converter leaves out, and we read
        keys["llama.attention.sliding_window"] = config["sliding_window"]
    bundle = export(llama_cpp.write(tmp_path / "model.gguf", arch, keys, tensors))
    with np.load(folder / "expected.npz") as expected:
        logits = bundle.prefill(expected["input_ids"].reshape(-1).tolist())
        assert relative_error(logits, expected["logits"]) < 1e-4
        greedy = bundle.greedy(int(logits[-1].argmax()), len(expected["greedy_ids"]))
        assert greedy == expected["greedy_ids"].tolist()


OWN = Path(__file__).parents[1] / "data" / "arch"


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "olmo2", "qwen2_yarn"])
def test_our_own_folders_in_llama_cpps_form_give_the_logits_of_transformers(
    tmp_path: Path, name: str
) -> None:
    """llama.cpp itself, given these files, agrees with transformers too (docs/checkpoints.md)."""
    bundle = export(own_gguf(tmp_path, name))
    with np.load(OWN / name / "expected.npz") as expected:
        logits = bundle.prefill(expected["input_ids"].tolist())
        assert relative_error(logits, expected["logits"]) < 1e-4
        greedy = bundle.greedy(int(logits[-1].argmax()), len(expected["greedy_ids"]))
        assert greedy == expected["greedy_ids"].tolist()


def own_gguf(tmp_path: Path, name: str, **changes: Any) -> Path:
    """That folder as a GGUF file, with settings changed."""
    keys, tensors = llama_cpp.convert(OWN / name)
    config = json.loads((OWN / name / "config.json").read_text())
    arch, vocab = llama_cpp.architecture(config), config["vocab_size"]
    keys = {key: value for key, value in keys.items() if not key.startswith("tokenizer.")}
    keys |= llama_cpp.words(vocab)
    keys |= {f"{arch}.{key}": value for key, value in changes.items()}
    return llama_cpp.write(tmp_path / "model.gguf", arch, keys, tensors)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma", {"final_logit_softcapping": 9.0}, "gemma.final_logit_softcapping = 9.0"),
        ("gemma2", {"rope.freq_base_swa": 9.0}, "gemma2.rope.freq_base_swa = 9.0"),
        ("gemma3", {"final_logit_softcapping": 9.0}, "gemma3.final_logit_softcapping = 9.0"),
        (
            "gemma3",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
            "gemma3.rope.scaling.type = 'yarn'",
        ),
        ("olmo2", {"attention.sliding_window": 8}, "olmo2.attention.sliding_window = 8"),
    ],
)
def test_settings_that_gemma_and_olmo2_do_not_have_are_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    """An OLMo 3 calls itself olmo2; a cap or a base passed over would be another model."""
    with pytest.raises(ConfigError) as caught:
        GgufCheckpoint(own_gguf(tmp_path, name, **changes))
    assert words in str(caught.value)


def test_gemma_3_says_which_layers_have_a_window_in_two_ways(tmp_path: Path) -> None:
    """A period, or a flag for each layer."""
    key = "attention.sliding_window_pattern"
    flags = [True, False, True, True, False, False]
    for pattern, expected in ((3, [True, True, False] * 2), (flags, flags)):
        found = GgufCheckpoint(own_gguf(tmp_path, "gemma3", **{key: pattern})).config
        assert found.window_layers == expected
    with pytest.raises(CheckpointError, match="sliding_window_pattern"):
        GgufCheckpoint(own_gguf(tmp_path, "gemma3", **{key: flags[:5]}))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3", "granite"])
def test_the_same_model_under_another_architecture_gives_the_same_logits(
    tmp_path: Path, arch: str
) -> None:
    """Without the golden folders, this still finds rows in the wrong order."""
    expected = ReferenceLlama(write_tiny_gguf(tmp_path / "llama.gguf")).logits(IDS)
    if arch == "granite":
        expected = expected * 2
    source = llama_cpp.write(tmp_path / "model.gguf", arch, *llama_cpp.as_family(arch))
    assert relative_error(export(source).prefill(IDS), expected) < 1e-4


def config_of(tmp_path: Path, arch: str, context: int | None = None, **changes: Any) -> Any:
    """The ModelConfig of such a file with some settings changed, None removing one."""
    keys, tensors = llama_cpp.as_family(arch)
    for name in [name for name in changes if isinstance(changes[name], np.ndarray)]:
        tensors[name] = changes.pop(name)
    keys |= {f"{arch}.{key}": value for key, value in changes.items()}
    source = llama_cpp.write(tmp_path / "model.gguf", arch, keys, tensors)
    return GgufCheckpoint(source, context).config


def test_yarn_turns_as_ggml_does(tmp_path: Path) -> None:
    """The ramp between stretched and kept frequencies, and the magnitude, as ggml writes them."""
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    config = config_of(tmp_path, "qwen2", **scaling)

    def corr_dim(rotations: float) -> float:  # ggml_rope_yarn_corr_dim
        return 16 * math.log(16 / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    start, end = max(0, math.floor(corr_dim(32))), min(15, math.ceil(corr_dim(1)))
    for j, divisor in enumerate(config.rope_divisors):  # rope_yarn
        ramp = 1 - min(1, max(0, (j - start) / max(0.001, end - start)))
        assert divisor == pytest.approx(1 / ((1 - ramp) / 4.0 + ramp))
    assert config.rope_magnitude == pytest.approx(1 + 0.1 * math.log(4.0))


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_alone_is_linear_scaling(tmp_path: Path, key: str) -> None:
    """So older converters wrote it, and so llama.cpp reads it."""
    assert config_of(tmp_path, "llama", **{key: 4.0}).rope_divisors == [4.0] * 8


def test_longrope_has_factors_for_short_contexts_and_for_long_ones(tmp_path: Path) -> None:
    """llama.cpp chooses by the context's size, and so does --max-context."""
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(3, 9, 8, dtype=np.float32)
    changes = {
        "rope_factors_short.weight": short,
        "rope_factors_long.weight": long,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": 1.25,
    }
    for context, factors, positions in ((None, short, 32), (32, short, 32), (33, long, 33)):
        config = config_of(tmp_path, "phi3", context, **changes)
        assert config.rope_divisors == factors.tolist()
        assert config.rope_magnitude == 1.25
        assert config.max_context == positions
    del changes["rope_factors_long.weight"]
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight is missing"):
        config_of(tmp_path, "phi3", 33, **changes)


def test_windows_are_those_of_the_model(tmp_path: Path) -> None:
    """phi3 has one in every file, 0 for none; Mistral's would be in a llama file."""
    window = "attention.sliding_window"
    assert config_of(tmp_path, "phi3", **{window: 0}).sliding_window == 0
    assert config_of(tmp_path, "phi3", **{window: 47}).sliding_window == 47
    assert config_of(tmp_path, "llama", **{window: 47}).sliding_window == 47


def test_a_head_may_turn_in_part(tmp_path: Path) -> None:
    """Phi 4 turns the first three quarters; where pairs are interleaved, a part means another."""
    heads = {"attention.head_count": 2, "attention.head_count_kv": 1}  # of 32, not of 16
    sizes = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16}
    config = config_of(tmp_path, "phi3", **heads, **sizes)
    assert (config.head_dim, config.rotary_dim) == (32, 16)
    with pytest.raises(ConfigError, match=r"llama\.rope\.dimension_count = 16"):
        config_of(tmp_path, "llama", **heads, **sizes)


def test_granite_may_be_without_rope_at_all(tmp_path: Path) -> None:
    """llama.cpp reads its key `finetuned` as this switch."""
    assert config_of(tmp_path, "granite").rope_layers is None
    found = config_of(tmp_path, "granite", **{"rope.scaling.finetuned": False})
    assert found.rope_layers == [False, False]


BIAS = {f"blk.{i}.attn_output.bias": np.ones(64, np.float32) for i in range(2)}


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("qwen2", {"attention.sliding_window": 47}, "qwen2.attention.sliding_window = 47"),
        ("qwen2", BIAS, "blk.0.attn_output.bias is unknown"),
        ("phi3", BIAS, "blk.0.attn_output.bias is unknown"),
        ("llama", {"logit_scale": 2.0}, "llama.logit_scale = 2.0"),
        ("llama", {"attention.scale": 2.0}, "llama.attention.scale"),
        ("llama", {"rope.scaling.type": "dynamic"}, "llama.rope.scaling.type = 'dynamic'"),
        (
            "llama",
            {"rope.scaling.type": "none", "rope.scaling.factor": 2.0},
            "llama.rope.scaling.factor = 2.0",
        ),
        (
            "llama",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.yarn_log_multiplier": 0.5,
            },
            "llama.rope.scaling.yarn_log_multiplier = 0.5",
        ),
        ("phi3", {"rope.dimension_count": 32}, "32 of them turned"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_architecture_does_not_have_is_refused_by_name(
    tmp_path: Path, arch: str, changes: dict[str, Any], words: str
) -> None:
    """A setting of another architecture would be ignored, and the logits wrong."""
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, arch, **changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        (np.ones(7, np.float32), "does not hold 8 numbers above 0"),
        (np.zeros(8, np.float32), "does not hold 8 numbers above 0"),
        (np.full(8, np.nan, np.float32), "does not hold 8 numbers above 0"),
        (np.ones(8, np.float16), "has type F16"),
        (np.ones(5000, np.float32), "5000 numbers"),
    ],
    ids=["short", "zero", "nan", "half", "long"],
)
def test_rope_factors_that_make_no_sense_are_refused(
    tmp_path: Path, factors: np.ndarray, words: str
) -> None:
    """Every position would be turned by them."""
    with pytest.raises(CheckpointError, match=words):
        config_of(tmp_path, "llama", **{"rope_freqs.weight": factors})


def nvfp4_with(tmp_path: Path, **extra: np.ndarray) -> Path:
    types = {"blk.0.ffn_up*": "NVFP4", "blk.0.attn_q*": "NVFP4"}
    return write_tiny_gguf(
        tmp_path / "model.gguf",
        types=types,
        extra={name.replace("__", "."): value for name, value in extra.items()},
    )


def test_a_scale_of_a_whole_tensor_multiplies_it(tmp_path: Path) -> None:
    """NVFP4 files keep one beside each matrix; without it, every weight is off by that factor."""
    plain = GgufCheckpoint(nvfp4_with(tmp_path)).read("model.layers.0.mlp.up_proj").dequantized()
    path = nvfp4_with(tmp_path, blk__0__ffn_up__scale=np.array([3.0], np.float32))
    found = GgufCheckpoint(path).read("model.layers.0.mlp.up_proj").dequantized()
    np.testing.assert_allclose(found, 3 * plain, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_that_makes_no_sense_is_refused(tmp_path: Path, value: float) -> None:
    """Every weight would be."""
    path = nvfp4_with(tmp_path, blk__0__ffn_up__scale=np.array([value], np.float32))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.scale"):
        GgufCheckpoint(path)
