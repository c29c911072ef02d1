"""Families through the runtime: what the engine does with a prompt is not in the graphs' tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortolan import SamplingParams
from ortolan.export.exporter import AttentionChoice, ExportOptions, export_bundle
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.engine import chunk_sizes
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig

ARCH = Path(__file__).parents[2] / "data" / "arch"
FAMILIES = ("gemma", "gemma2", "gemma3", "olmo2")
FLAVORS: tuple[AttentionChoice, ...] = ("gqa", "onnx")


@pytest.mark.parametrize("attention", FLAVORS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_runs_in_chunks_and_continues_as_transformers_does(
    tmp_path: Path, name: str, attention: AttentionChoice
) -> None:
    """Windows, caps and two kinds of rope must hold across chunks, and bits must not tell them."""
    export_bundle(str(ARCH / name), tmp_path / "bundle", ExportOptions(attention=attention))
    expected = np.load(ARCH / name / "expected.npz")
    ids = expected["input_ids"].tolist()
    config = EngineConfig(max_context=64, max_slots=2, accuracy="exact")
    with LLM(Bundle.open(tmp_path / "bundle"), config) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        (answer,) = llm.generate(ids, params)
        assert list(answer.token_ids) == expected["greedy_ids"].tolist()
        model = llm._running()._model
        rows = []
        for chunk in (40, 7, 16):
            start = 0
            for size in chunk_sizes(len(ids), chunk):
                logits = model.prefill(1, [ids[start : start + size]], [start], [[size - 1]])
                start += size
            rows.append(logits[0, 0].copy())
        np.testing.assert_allclose(rows[0], expected["logits"][-1], atol=1e-4)
        np.testing.assert_array_equal(rows[0], rows[1])
        np.testing.assert_array_equal(rows[0], rows[2])
