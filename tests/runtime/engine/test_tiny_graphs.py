"""Graphs written by hand are models like any other."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ortolan.runtime.engine import tiny_graphs
from ortolan.runtime.engine.sessions import open_tiny_graph
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.providers import find_provider

GRAPHS = {
    "zeros": tiny_graphs.zeros_graph("float32", 4),
    "zeros float16": tiny_graphs.zeros_graph("float16", 3),
    "take": tiny_graphs.take_graph("float32"),
    "put": tiny_graphs.put_graph("int8"),
    "product": tiny_graphs.product_graph(),
    "pick": tiny_graphs.pick_graph(300),
    "pick of many": tiny_graphs.pick_graph(200_000),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_onnx_takes_them(name: str) -> None:
    """Our encoder has a reader that is not ours: names, types and attributes must be ONNX's."""
    model = onnx.load_from_string(GRAPHS[name])
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString() == GRAPHS[name]


def run(graph: bytes, **inputs: np.ndarray) -> np.ndarray:
    use_threads(None)
    session = open_tiny_graph(graph, find_provider("cpu", ort))
    (output,) = session.run(None, inputs)
    return output


def test_zeros_have_the_shape_asked_for() -> None:
    """All memory on a device comes from it."""
    found = run(GRAPHS["zeros"], shape=np.array([2, 3, 1, 4]))
    assert found.shape == (2, 3, 1, 4)
    assert found.dtype == np.float32
    assert not found.any()


def test_take_and_put_move_one_slot() -> None:
    """A neighbour's cache that moves along, or is written over, is another request's answer."""
    slots = np.arange(48, dtype=np.float32).reshape(3, 2, 4, 2)
    row = run(GRAPHS["take"], slots=slots, index=np.array([1]))
    np.testing.assert_array_equal(row, slots[1:2])
    chosen = np.array([True, False, False]).reshape(3, 1, 1, 1)
    graph = tiny_graphs.put_graph("float32")
    found = run(graph, slots=slots, row=row, chosen=chosen)
    np.testing.assert_array_equal(found[0], slots[1])
    np.testing.assert_array_equal(found[1:], slots[1:])


def test_pick_counts_positions_across_rows() -> None:
    """The sampler sees the logits of these places and of no others."""
    logits = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    graph = tiny_graphs.pick_graph(3)
    found = run(graph, logits=logits, index=np.array([3, 0, 0]))
    np.testing.assert_array_equal(found, [[9, 10, 11], [0, 1, 2], [0, 1, 2]])
