"""Bytes and operations counted from a graph, against sums worked by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("onnx")

from ortolan.bench.cost import (
    Bound,
    Call,
    Cost,
    Peaks,
    bound_of,
    call_cost,
    decode_cost,
    prefill_cost,
)
from ortolan.bench.graph import Node, read_graph
from ortolan.errors import BundleError
from ortolan.graphs.manifest import Manifest, ModelConfig
from ortolan.runtime.engine.packed import optimized_graphs
from ortolan.runtime.params import EngineConfig

# tests/tiny_llama.py: 2 layers, width 64, 4 heads and 2 KV heads of 16, inner width 96, 300 tokens;
# Q4_1 blocks of 32 with offsets, a tied Q8_0 table. K and N of each layer's products:
PRODUCTS = {"qkv": (64, 128), "out": (64, 64), "gate_up": (64, 192), "down": (96, 64)}
LAYERS, VOCAB, HIDDEN = 2, 300, 64
KV_BYTES = 2 * 2 * 16 * 4  # keys and values, heads, head_dim, float32


def codes_bytes() -> int:
    """4-bit codes, and a float32 scale and offset for each 32 of them."""
    return sum(k * n // 2 + 2 * 4 * (k // 32) * n for k, n in PRODUCTS.values())


def by_hand(rows: int, past: int) -> Cost:
    """One decode step."""
    layer = codes_bytes() + 2 * HIDDEN * 4  # two norms
    head = VOCAB * HIDDEN + VOCAB * 2 * 4
    embedding = rows * (HIDDEN + 2 * 4)
    kv = rows * KV_BYTES * (past + 1 + 1)  # all read, the new token's written
    attention = 4 * (4 * 16) * (past + 1)  # scores and sum, each a multiply-add per head dimension
    offsets = 2 * sum(k // 32 * n for k, n in PRODUCTS.values())
    return Cost(
        LAYERS * (layer + kv) + head + embedding + HIDDEN * 4,
        {
            "int4": rows * LAYERS * 2 * sum(k * n for k, n in PRODUCTS.values()),
            "int8": rows * 2 * VOCAB * HIDDEN,
            "float32": rows * LAYERS * (offsets + attention),
        },
    )


@pytest.fixture(scope="module")
def graphs(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The optimized graphs: what a session runs."""
    cache = tmp_path_factory.mktemp("packed")
    return optimized_graphs(tiny_bundle, EngineConfig(cache_dir=str(cache)))


@pytest.fixture(scope="module")
def config(tiny_bundle: Path) -> ModelConfig:
    return Manifest.read(tiny_bundle).model


def by_kind_of_number(cost: Cost) -> dict[str, float]:
    """ "int4 block 32" as "int4", as the sums by hand have it."""
    return {name.partition(" ")[0]: flops for name, flops in cost.flops.items()}


@pytest.mark.parametrize(("rows", "past"), [(1, 0), (1, 17), (5, 40)])
def test_decode_step_costs_what_the_hand_finds(
    graphs: dict[str, Path], config: ModelConfig, rows: int, past: int
) -> None:
    """A wrong count would tell people that a step is near its limit, or far from it."""
    found = call_cost(read_graph(graphs["decode"]), config, Call(rows, 1, past))
    expected = by_hand(rows, past)
    assert found.bytes == expected.bytes
    assert by_kind_of_number(found) == expected.flops


def test_fusion_leaves_the_count_alone(
    graphs: dict[str, Path], tiny_bundle: Path, config: ModelConfig
) -> None:
    """The bound belongs to the model and its format, not to how far a session optimized it."""
    fused, stored = (
        call_cost(read_graph(path), config, Call(3, 1, 9))
        for path in (graphs["decode"], tiny_bundle / "decode.onnx")
    )
    assert fused.bytes == stored.bytes
    assert fused.total_flops == stored.total_flops


def test_prompt_reads_the_weights_once_per_chunk(
    graphs: dict[str, Path], config: ModelConfig
) -> None:
    """Operations do not depend on the chunks; weight traffic does, which is why chunks are long."""
    nodes = read_graph(graphs["prefill_ragged"])
    whole, halves = (prefill_cost(nodes, config, chunks) for chunks in ([32], [16, 16]))
    head = Counter({"int8 block 32": 2 * VOCAB * HIDDEN})  # one position of each call
    assert Counter(halves.flops) - Counter(whole.flops) == head
    weights = sum(node.weight_bytes for node in nodes)
    kv_again = LAYERS * KV_BYTES * 16  # the second half reads the first one's
    assert halves.bytes - whole.bytes == weights + kv_again


def test_attention_of_a_chunk_is_causal(graphs: dict[str, Path], config: ModelConfig) -> None:
    """Counting the whole square would double attention's share."""
    nodes = [node for node in read_graph(graphs["prefill_ragged"]) if node.kind == "attention"]
    cost = call_cost(nodes, config, Call(1, 4, 10))
    assert cost.total_flops == LAYERS * 4 * (4 * 16) * (11 + 12 + 13 + 14)


def test_steps_cost_what_the_middle_one_costs(graphs: dict[str, Path], config: ModelConfig) -> None:
    """Five steps from 10 on see 11 to 15 tokens: 13 on average."""
    nodes = read_graph(graphs["decode"])
    assert decode_cost(nodes, config, 2, 10, 5) == call_cost(nodes, config, Call(2, 1, 12))


def test_every_node_of_a_layer_has_its_kind(graphs: dict[str, Path]) -> None:
    """A node under the wrong heading sends the reader to the wrong place."""
    nodes = read_graph(graphs["decode"])
    counts = Counter((node.kind, node.op) for node in nodes if node.layer == 0)
    assert counts["offsets", "Gemm"] == 4
    assert counts["offsets", "ReduceSum"] == counts["offsets", "Reshape"] == 4
    for kind in PRODUCTS:
        assert counts[kind, "MatMulNBits"] == 1, kind
    assert counts["attention", "GroupQueryAttention"] == 1
    assert sum(counts[kind, op] for kind, op in counts if kind == "norm") == 2
    assert [node.kind for node in nodes if node.op == "GatherBlockQuantized"] == ["embedding"]
    assert [node.format for node in nodes if node.kind == "head"] == ["int8 block 32"]


def test_windowed_layer_reads_its_window_only(graphs: dict[str, Path], config: ModelConfig) -> None:
    """A model with sliding windows is not slow for reading less than its context."""
    from dataclasses import replace

    nodes = [node for node in read_graph(graphs["decode"]) if node.kind == "attention"]
    windowed = replace(config, sliding_window=8, window_layers=[True, False])
    cost = call_cost(nodes, windowed, Call(1, 1, 30))
    assert cost.bytes == KV_BYTES * ((8 + 1) + (31 + 1))
    assert cost.total_flops == 4 * (4 * 16) * (8 + 31)


def test_bound_is_the_slower_side() -> None:
    """10 GB at 5 GB/s against 6 G operations at 4 and 2 G at 1: memory 2 s, products 3.5 s."""
    peaks = Peaks(5e9, {"float32": 1e9, "int4 block 32": 4e9})
    assert bound_of(Cost(10e9, {"int4 block 32": 6e9, "float32": 2e9}), peaks) == Bound(2.0, 3.5)
    assert bound_of(Cost(10e9, {"int4 block 32": 6e9}), peaks).limit == "memory"


def test_format_without_a_peak_is_held_against_float32() -> None:
    """A format that nothing was measured for must not end in a KeyError."""
    assert bound_of(Cost(0, {"int3 block 8": 2e9}), Peaks(1e9, {"float32": 1e9})).compute_s == 2.0


def test_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    """A parser's own error would not name the file."""
    (tmp_path / "decode.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"decode\.onnx: is no ONNX graph"):
        read_graph(tmp_path / "decode.onnx")


def test_node_without_weights_costs_nothing(config: ModelConfig) -> None:
    """Activations stay in caches; counting them as memory traffic would raise the bound."""
    assert call_cost([Node("Add", "Add", "other", 0)], config, Call(1, 1, 0)).bytes == 0
