"""What the model's calls keep between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.model import Model
from ortolan.runtime.engine.opening import open_engine
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.text.tokenizer import Tokenizer


def test_prefill_of_every_shape_writes_logits_to_one_place(tiny_bundle: Path) -> None:
    """A vocabulary of 128,000 makes 33 MB of logits for a scored chunk, once per slot."""
    config = EngineConfig(max_slots=4, kv_tokens=100, prefix_cache_mb=0)
    engine = open_engine(Bundle.open(tiny_bundle), config, Tokenizer.open(tiny_bundle))
    model = engine._model
    assert isinstance(model, Model)
    first = model.prefill(0, [[5] * 32], [0], [list(range(32))]).copy()
    for slot in range(4):
        model.prefill(slot, [[6] * 20], [0], [[19]])
        again = model.prefill(slot, [[5] * 32], [0], [list(range(32))])
        np.testing.assert_array_equal(again, first)
    model.prefill(0, [[7] * 9, [8] * 9], [0, 0], [[8], [8]])
    places = [binding.logits for binding in model._prefill.values()]
    assert len(places) == 5
    assert all(np.shares_memory(place, places[0]) for place in places)
