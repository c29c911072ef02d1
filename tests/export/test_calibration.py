"""Running a model layer by layer: the same numbers as the whole model, and honest statistics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exact_bundle import ExactBundle
from reference_llama import ReferenceLlama
from tiny_hf import FAMILIES, config, write_folder
from tiny_llama import write_tiny_gguf

from ortolan.errors import CheckpointError
from ortolan.export.calibration import TAPS, InputStats, LayerRunner
from ortolan.export.exporter import ExportOptions, export_bundle, open_checkpoint

ARCH = Path(__file__).parents[1] / "data" / "arch"
IDS = np.random.default_rng(0).integers(3, 299, (3, 20))


def runner_of(source: Path, ids: np.ndarray = IDS) -> LayerRunner:
    checkpoint = open_checkpoint(source, None)
    return LayerRunner(checkpoint, checkpoint.config, ids)


def through(runner: LayerRunner) -> np.ndarray:
    """Hidden states after the last layer."""
    hidden = runner.embedded()
    for layer in range(runner.config.num_layers):
        hidden = runner.run(layer, runner.weights(layer), hidden)
    return hidden


def logits(source: Path, runner: LayerRunner) -> np.ndarray:
    """[windows, chunk, vocab] by the layers one after another, and a head in numpy."""
    checkpoint = open_checkpoint(source, None)
    c = checkpoint.config
    table = checkpoint.read("model.embed_tokens" if c.tie_embeddings else "lm_head").dequantized()
    found = runner.head_inputs(through(runner)) @ table.T / c.logits_divisor
    return c.logits_softcap * np.tanh(found / c.logits_softcap) if c.logits_softcap else found


@pytest.mark.parametrize("name", [*FAMILIES, *sorted(path.name for path in ARCH.iterdir())])
def test_layers_one_by_one_are_the_model(tmp_path: Path, name: str) -> None:
    """Statistics of another model would make good weights bad, for one family and unnoticed."""
    own = ARCH / name
    source = own if own.is_dir() else write_folder(tmp_path / name, config(name))
    export_bundle(str(source), tmp_path / "bundle", ExportOptions("float32", attention="onnx"))
    runner = runner_of(source, IDS % 100)
    found = logits(source, runner)
    for window, ids in zip(found, runner.windows, strict=True):
        expected = ExactBundle(tmp_path / "bundle").prefill(ids.tolist())
        assert np.abs(window - expected).max() < 1e-4 * np.abs(expected).max()


def test_taps_hold_what_the_linear_layers_read(tmp_path: Path) -> None:
    """All that is decided from them is decided for these inputs, of every window and position."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    runner = runner_of(source)
    seen: dict[str, list[np.ndarray]] = {tap: [] for tap in TAPS}
    weights, hidden = runner.weights(0), runner.embedded()
    runner.run(0, weights, hidden, lambda taps: [seen[t].append(x.copy()) for t, x in taps.items()])
    stats, _ = runner.statistics(0, weights, hidden)
    assert {tap: stats[tap].rows for tap in TAPS} == dict.fromkeys(TAPS, IDS.size)
    for tap, inputs in seen.items():
        x = np.concatenate(inputs).astype(np.float64)
        assert np.allclose(stats[tap].moments, x.T @ x, atol=1e-3)
        assert np.allclose(stats[tap].absmax, np.abs(x).max(0))
    # The first is worked out apart, the last by what it gives.
    reference = ReferenceLlama(source)
    normed = reference._norm(reference.weights["token_embd"][IDS.ravel()], "blk.0.attn_norm")
    assert np.allclose(np.concatenate(seen["attention_in"]), normed, atol=1e-5)
    branch = np.concatenate(seen["mlp_down"]) @ weights["mlp.down_proj"].T
    silent = {**weights, "mlp.down_proj": np.zeros_like(weights["mlp.down_proj"])}
    difference = runner.run(0, weights, hidden) - runner.run(0, silent, hidden)
    assert np.allclose(difference.reshape(branch.shape), branch, atol=1e-4)


def test_head_statistics_are_of_all_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are taken at a time."""
    monkeypatch.setattr("ortolan.export.calibration._HEAD_ROWS", 40)
    runner = runner_of(write_tiny_gguf(tmp_path / "tiny.gguf"))
    hidden = through(runner)
    x = runner.head_inputs(hidden).reshape(-1, hidden.shape[-1])
    found = runner.head_statistics(hidden, -hidden)
    assert found.seen.rows == IDS.size
    assert np.allclose(found.seen.moments, x.T @ x, rtol=1e-4, atol=1e-3)
    assert np.allclose(found.cross, -x.T @ x, rtol=1e-4, atol=1e-3)


def test_pairs_are_of_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rounded layer's inputs should have been is another one's inputs at that place."""
    monkeypatch.setattr("ortolan.export.calibration._TAP_BYTES", 4 * 20 * 96 * 2)  # two windows
    runner = runner_of(write_tiny_gguf(tmp_path / "tiny.gguf"))
    weights, exact = runner.weights(0), runner.embedded()
    hidden = exact + np.float32(0.1) * np.random.default_rng(0).standard_normal(
        exact.shape, np.float32
    )
    seen: list[dict[str, np.ndarray]] = []
    after = runner.run(0, weights, exact, lambda taps: seen.append(dict(taps)))
    runner.run(0, weights, hidden, lambda taps: seen.append(dict(taps)))
    half = len(seen) // 2
    stats, found = runner.paired_statistics(0, weights, exact, hidden)
    assert np.array_equal(found, after)
    for tap in TAPS:
        wanted, x = (np.concatenate([part[tap] for part in p]) for p in (seen[:half], seen[half:]))
        assert np.allclose(stats[tap].seen.moments, x.T @ x, rtol=1e-4, atol=1e-3)
        assert np.allclose(stats[tap].cross, wanted.T @ x, rtol=1e-4, atol=1e-3)


def test_next_layer_reads_what_the_given_weights_make(tmp_path: Path) -> None:
    """Rounded weights must meet the inputs that rounded weights before them give."""
    runner = runner_of(write_tiny_gguf(tmp_path / "tiny.gguf"))
    hidden, weights = runner.embedded(), runner.weights(0)
    still = {name: value * (value.ndim == 1) for name, value in weights.items()}
    assert np.array_equal(runner.run(0, still, hidden), hidden)
    assert np.abs(runner.run(0, weights, hidden) - hidden).max() > 0.1


def test_statistics_of_scaled_inputs_are_those_of_the_inputs_scaled() -> None:
    """A scale that is folded into the layer before must not cost another run."""
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((50, 8)), rng.uniform(0.1, 9, 8)
    stats, scaled = InputStats.empty(8), InputStats.empty(8)
    stats.add(x.astype(np.float32))
    scaled.add((x / scale).astype(np.float32))
    found = stats.divided(scale.astype(np.float32))
    assert np.allclose(found.moments, scaled.moments, rtol=1e-4, atol=1e-4)
    assert np.allclose(found.absmax, scaled.absmax, rtol=1e-4)
    assert found.rows == scaled.rows


def test_numbers_that_run_away_are_named(tmp_path: Path) -> None:
    """Damaged weights would make every block of every later layer meaningless."""
    runner = runner_of(write_tiny_gguf(tmp_path / "tiny.gguf"))
    weights = runner.weights(1)
    weights["mlp.down_proj"] = np.full_like(weights["mlp.down_proj"], 3e38)
    with pytest.raises(CheckpointError, match="layer 1 computes numbers that are not finite"):
        runner.run(1, weights, runner.embedded())
