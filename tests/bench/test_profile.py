"""ONNX Runtime's profile, summed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ortolan.bench.cost import Cost, Peaks
from ortolan.bench.graph import Node
from ortolan.bench.profile import NodeTime, group, parse_profile
from ortolan.errors import BenchError

# Recorded from three decode steps of two rows of a tiny model: 999, 614 and 506 us. Only the
# operators of the embedding and of the first layer's attention, without what nothing reads.
RECORDED = Path(__file__).with_name("decode_profile.json")
GQA = "model/layers.0/self_attn/GroupQueryAttention_node_8"
QKV = "model/layers.0/self_attn/qkv_proj/MatMul_node_5"


@pytest.fixture
def events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def test_warm_up_and_slow_runs_are_left_out(events: list[dict[str, Any]]) -> None:
    """The first step touches every page for the first time: nobody waits for that again."""
    times, total_s = parse_profile(events, 1, skip=1)
    found = {time.name: time for time in times}
    assert total_s == pytest.approx(506e-6)
    assert found[GQA].op == "GroupQueryAttention"
    assert found[GQA].seconds == pytest.approx(12e-6)
    assert found[QKV].seconds == pytest.approx(7e-6)
    assert len(times) == 12


def test_kept_runs_are_averaged(events: list[dict[str, Any]]) -> None:
    """The profile counts whole microseconds: one run of a small operator says little."""
    times, total_s = parse_profile(events, 1, skip=0)
    found = {time.name: time.seconds for time in times}
    assert total_s == pytest.approx((614e-6 + 506e-6) / 2)
    assert found[GQA] == pytest.approx((16e-6 + 12e-6) / 2)


def test_unit_of_several_calls_is_their_sum(events: list[dict[str, Any]]) -> None:
    """A prompt that is read in chunks is one thing to its reader."""
    times, total_s = parse_profile(events, 3, skip=0)
    found = {time.name: time.seconds for time in times}
    assert total_s == pytest.approx((999 + 614 + 506) * 1e-6)
    assert found[GQA] == pytest.approx((48 + 16 + 12) * 1e-6)


def test_profile_without_a_complete_run_is_refused(events: list[dict[str, Any]]) -> None:
    """Shares of nothing would be divisions by zero."""
    with pytest.raises(BenchError, match="no complete run"):
        parse_profile(events, 1, skip=3)


PEAKS = Peaks(1e9, {"float32": 1e9, "int4 block 32": 10e9})
TIMES = [
    NodeTime("a", "MatMulNBits", 4e-3, 5e6),
    NodeTime("b", "MatMulNBits", 2e-3, 5e6),
    NodeTime("c", "Add", 2e-3, 1e6),
]
COSTS = {
    # 1 MB is 1 ms of memory, 20 M operations are 2 ms of products.
    "a": (Node("a", "MatMulNBits", "qkv", 0), Cost(1e6, {"int4 block 32": 20e6})),
    # 1 MB against 5 M operations, half a millisecond.
    "b": (Node("b", "MatMulNBits", "down", 0), Cost(1e6, {"int4 block 32": 5e6})),
    "c": (Node("c", "Add", "activation", 0), Cost(0, {})),
}


def test_kinds_are_told_apart_by_what_bounds_them() -> None:
    """Where memory is the limit, a faster product helps nobody."""
    lines = {line.name: line for line in group(TIMES, COSTS, PEAKS, lambda node, time: node.kind)}
    assert list(lines) == ["qkv", "down", "activation"]  # the slowest first
    assert (lines["qkv"].limit, lines["qkv"].fraction) == ("compute", pytest.approx(0.5))
    assert (lines["down"].limit, lines["down"].fraction) == ("memory", pytest.approx(0.5))
    # No weights: the activations that it reads and writes, as the profile says.
    assert (lines["activation"].limit, lines["activation"].fraction) == (
        "memory",
        pytest.approx(0.5),
    )
    assert [line.share for line in lines.values()] == [0.5, 0.25, 0.25]


def test_operators_of_one_name_are_one_line() -> None:
    """121 lines of MatMulNBits would say less than one."""
    lines = group(TIMES, COSTS, PEAKS, lambda node, time: time.op)
    assert [(line.name, line.count) for line in lines] == [("MatMulNBits", 2), ("Add", 1)]
    assert lines[0].seconds == pytest.approx(6e-3)


def test_sampling_has_its_share_and_no_bound() -> None:
    """It runs outside of the session that was profiled, but inside of every step."""
    lines = group(TIMES, COSTS, PEAKS, lambda node, time: node.kind, extra=("sampler", 8e-3))
    assert (lines[0].name, lines[0].share, lines[0].limit) == ("sampling", 0.5, "")


def test_node_that_the_graph_does_not_name_is_still_counted() -> None:
    """Shares have to add up to the whole."""
    lines = group([*TIMES, NodeTime("new", "Cast", 8e-3, 0)], COSTS, PEAKS, lambda n, t: n.kind)
    assert (lines[0].name, lines[0].share) == ("other", 0.5)
