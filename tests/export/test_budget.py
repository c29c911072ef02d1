"""A budget of bits: kept, spent where it buys most, and measured on the model itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import write_tiny_gguf

from ortolan.errors import UsageError
from ortolan.export.budget import Group, candidates, measured, spent
from ortolan.export.exporter import ExportOptions, export_bundle, open_checkpoint
from ortolan.export.precision import Quantization, choose_formats
from ortolan.graphs.formats import WeightFormat

FORMATS = candidates(affine=False)


def group(layer: int, weights: int, costs: list[float]) -> Group:
    return Group(
        layer, "mlp_down", ("mlp.down_proj",), 512, weights, dict(zip(FORMATS, costs, strict=True))
    )


def bits(groups: list[Group], chosen: Mapping[str, WeightFormat]) -> float:
    total = sum(g.bits(chosen[name_of(g)]) for g in groups)
    return total / sum(g.weights for g in groups)


def name_of(found: Group) -> str:
    return f"model.layers.{found.layer}.mlp.down_proj"


def cost(groups: list[Group], chosen: Mapping[str, WeightFormat]) -> float:
    return sum(g.costs[chosen[name_of(g)]] for g in groups)


def random_groups(seed: int, count: int) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        group(i, int(rng.integers(1, 9)) * 1000, sorted(rng.exponential(1.0 + i, 5), reverse=True))
        for i in range(count)
    ]


@pytest.mark.parametrize("budget", [4.125, 4.2, 4.5, 5.0, 6.5, 8.25])
@pytest.mark.parametrize("seed", range(5))
def test_budget_is_kept_and_nearly_as_well_spent_as_can_be(seed: int, budget: float) -> None:
    """Against every way to spend it; what is left over is less than one step."""
    groups = random_groups(seed, 5)
    chosen = spent(groups, budget)
    assert bits(groups, chosen) <= budget + 1e-9
    ways = (
        {name_of(g): fmt for g, fmt in zip(groups, formats, strict=True)}
        for formats in itertools.product(FORMATS, repeat=len(groups))
    )
    best = min(cost(groups, way) for way in ways if bits(groups, way) <= budget + 1e-9)
    cheapest = cost(groups, spent(groups, 4.125))
    assert cost(groups, chosen) - best <= 0.35 * (cheapest - best) + 1e-9


def test_more_bits_never_cost_more(tmp_path: Path) -> None:
    """Who gives more must get more."""
    groups = random_groups(7, 40)
    costs = [cost(groups, spent(groups, budget)) for budget in np.linspace(4.125, 8.25, 30)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == sum(min(g.costs.values()) for g in groups)


def test_too_little_is_refused() -> None:
    """Blocks with offsets take more than those without."""
    formats = candidates(affine=True)
    costs = dict(zip(formats, [5.0, 4.0, 3.0, 2.0, 1.0], strict=True))
    with pytest.raises(UsageError, match=r"take 4\.250 in this model"):
        spent([Group(0, "mlp_down", ("mlp.down_proj",), 256, 10, costs)], 4.2)


def test_costs_are_those_of_the_model(tmp_path: Path) -> None:
    """A group that changes nothing must get no bits, whatever its weights look like."""
    silent = np.zeros((64, 96), np.float32)
    extra = {"blk.1.ffn_down.weight": silent + 1e-4}
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", extra=extra), None)
    formats = choose_formats(checkpoint.formats, checkpoint.config, "int4", Quantization(32))
    windows = np.random.default_rng(0).integers(3, 299, (8, 64))
    groups = measured(checkpoint, checkpoint.config, formats, windows, affine=False)
    assert len(groups) == 8
    by_place = {(g.layer, g.tap): g for g in groups}
    probe = WeightFormat("int4", 128)
    quiet = by_place[1, "mlp_in"].costs[probe]  # whatever it says, the next says next to nothing
    loud = by_place[0, "mlp_in"].costs[probe]
    assert quiet < 0.05 * loud
    for found in groups:
        costs = list(found.costs.values())
        assert costs[-1] < 0.05 * costs[0] or found.costs[probe] < 1e-6
    chosen = spent(groups, 5.0)
    assert chosen["model.layers.1.mlp.gate_proj"].block_size == 256


def test_bundle_takes_no_more_bits_than_were_given(tmp_path: Path) -> None:
    """From the option to the manifest, scales counted."""
    source = str(write_tiny_gguf(tmp_path / "m.gguf"))
    quantization = Quantization(embedding="source", calibrate=True, bits_per_weight=5.5)
    options = ExportOptions("int4", quantization=quantization)
    manifest = export_bundle(source, tmp_path / "bundle", options)
    layers = [g for g in manifest.weights if g.role in ("attention", "mlp")]
    assert len({g.precision for g in layers}) > 1
    # Widths of 64 and 96, so that blocks are cut short.
    assert sum(g.bytes for g in layers) * 8 <= 5.5 * sum(g.elements for g in layers)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bits_per_weight": 4.0, "calibrate": True}, "blocks take 4.125 to 8.25"),
        ({"bits_per_weight": 4.2, "calibrate": True, "symmetric": False}, "4.25 to 8.5"),
        ({"bits_per_weight": float("nan"), "calibrate": True}, "not possible"),
        ({"bits_per_weight": 5.0}, "add --calibrate"),
        ({"bits_per_weight": 5.0, "calibrate": True, "block_size": 64}, "--block-size 64"),
    ],
)
def test_budgets_that_cannot_be_are_refused(settings: dict[str, object], said: str) -> None:
    """Before minutes of measuring."""
    with pytest.raises(UsageError, match=said):
        Quantization(**settings)


def test_budget_is_for_int4(tmp_path: Path) -> None:
    """What is kept or expanded has no blocks to choose."""
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "m.gguf"), None)
    quantization = Quantization(calibrate=True, bits_per_weight=5.0)
    with pytest.raises(UsageError, match="without --weights int4"):
        choose_formats(checkpoint.formats, checkpoint.config, "int8", quantization)
