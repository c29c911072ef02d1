"""The plan: how memory is divided, and that it is what engines hold."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

import ortolan
from ortolan.errors import UsageError
from ortolan.graphs.manifest import Manifest
from ortolan.runtime.engine import opening
from ortolan.runtime.memory import Memory
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.plan import Plan, plan_memory
from ortolan.runtime.providers import Provider, find_provider

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]
CPU = find_provider("cpu", ort)


def planned(
    bundle: Path,
    mib: int | None,
    provider: Provider = CPU,
    source: Any = "given",
    replicas: int = 1,
    **settings: Any,
) -> Plan:
    """The plan with that much memory, in a process of 60 MiB."""
    memory = None if mib is None else Memory(mib * MIB, source)
    manifest = Manifest.read(bundle)
    config = EngineConfig(**settings)
    return plan_memory(manifest, config, provider, memory, 60 * MIB, replicas=replicas)


def part(plan: Plan, name: str) -> int:
    """Bytes of a part."""
    return next(part.bytes for part in plan.parts if part.name == name)


def test_kv_is_layers_heads_and_bytes(tiny_bundle: Path) -> None:
    """2 layers x 2 (keys, values) x 2 heads x 16 numbers x 4 bytes, worked by hand."""
    plan = planned(tiny_bundle, 1000, max_slots=3, max_context=50)
    assert plan.token_bytes == 512
    assert part(plan, "KV") == 3 * 50 * 512
    assert plan.total == sum(part.bytes for part in plan.parts)
    assert not plan.is_too_large


def test_memory_that_is_given_is_used_and_not_exceeded(tiny_bundle: Path) -> None:
    """What fits is the question; a plan above the limit would be an invitation to be killed."""
    small = planned(tiny_bundle, 120, max_slots=2000, max_context=64)
    large = planned(tiny_bundle, 150, max_slots=2000, max_context=64)
    for plan, size in ((small, 120), (large, 150)):
        assert 0.98 * size * MIB < plan.total <= size * MIB
        assert plan.kv_tokens == plan.tokens_that_fit < plan.tokens_wanted
        assert plan.slots_that_fit == plan.tokens_that_fit // 64
    grown = large.tokens_that_fit - small.tokens_that_fit
    # A sixth goes to the prefix cache.
    assert grown * 512 == pytest.approx(30 * MIB * 5 / 6, rel=0.01)


def test_replicas_share_memory_and_weights_and_nothing_else(tiny_bundle: Path) -> None:
    """Two that each took what is free would take twice what there is."""
    settings: dict[str, Any] = {"max_slots": 2000, "max_context": 64}
    one = planned(tiny_bundle, 200, **settings)
    three = planned(tiny_bundle, 200, replicas=3, **settings)
    assert 0.98 * 200 * MIB < three.total <= 200 * MIB
    assert three.kv_tokens < one.kv_tokens / 3
    assert part(three, "KV") == 3 * three.kv_tokens * 512
    assert part(three, "prefix cache") == 3 * three.prefix_bytes
    for name in ("activations", "logits"):
        assert part(three, name) == 3 * part(one, name)
    for name in ("process", "weights"):
        assert part(three, name) == part(one, name)
    given = planned(tiny_bundle, 300, replicas=2, kv_tokens=70, prefix_cache_mb=3)
    assert (given.kv_tokens, part(given, "prefix cache")) == (70, 6 * MIB)


def test_a_machines_memory_is_shared_with_others(tiny_bundle: Path) -> None:
    """A workstation has other uses for its memory; a container's limit is there to be used."""
    settings: dict[str, Any] = {"max_slots": 10**6, "max_context": 64, "prefix_cache_mb": 0}
    rooms = [
        planned(tiny_bundle, 4000, source=source, **settings).room
        for source in ("given", "container", "machine")
    ]
    assert rooms[0] == rooms[1]
    assert rooms[0] - rooms[2] == pytest.approx(0.4 * 4000 * MIB)


def test_settings_that_are_given_are_kept_and_judged(tiny_bundle: Path) -> None:
    """Somebody who says how much KV to hold is told, not overruled."""
    plan = planned(tiny_bundle, 100, max_slots=10**5, kv_tokens=10**6, prefix_cache_mb=7)
    assert plan.kv_tokens == 10**6
    assert plan.prefix_bytes == 7 * MIB
    assert plan.is_too_large


def test_too_little_memory_still_leaves_an_engine(tiny_bundle: Path) -> None:
    """A KV budget of nothing would refuse every prompt."""
    plan = planned(tiny_bundle, 10, max_slots=100)
    assert plan.is_too_large
    assert plan.kv_tokens == 256
    assert plan.tokens_that_fit == plan.slots_that_fit == 0


def test_context_beyond_the_bundles_is_refused(tiny_bundle: Path) -> None:
    """A plan for what cannot be loaded helps nobody."""
    with pytest.raises(UsageError, match="this bundle allows 2 to 64"):
        planned(tiny_bundle, 100, max_context=65)


def test_device_holds_weights_and_all_of_the_kv(tiny_bundle: Path) -> None:
    """A device gives memory to every position at once, and one slot more for prompts."""
    device = dataclasses.replace(
        CPU, name="cuda", device="cuda", capabilities=type(CPU.capabilities)()
    )
    plan = planned(tiny_bundle, None, device, max_slots=3, max_context=50)
    places = {part.name: part.place for part in plan.parts}
    assert places["KV"] == places["weights"] == places["activations"] == "device"
    assert places["process"] == "host"
    assert part(plan, "KV") == 4 * 50 * 512
    assert part(plan, "prefix cache") == 0
    assert [part.name for part in plan.disk] == ["bundle"]  # nothing is packed there
    assert not plan.is_too_large  # nobody knows
    assert planned(tiny_bundle, 1, device, max_slots=300).is_too_large
    assert planned(tiny_bundle, 1000, device).prefix_bytes == 0  # it would copy from the host


def test_engine_holds_what_the_plan_says(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`ortolan plan` and `ortolan serve` must not disagree."""
    memory = Memory(110 * MIB, "container")
    monkeypatch.setattr(opening, "memory_found", lambda: memory)
    monkeypatch.setattr(opening, "process_bytes", lambda: 60 * MIB)
    settings: dict[str, Any] = {"max_slots": 1000, "max_context": 64}
    plan = planned(tiny_bundle, 110, source="container", **settings)
    with ortolan.load(tiny_bundle, **settings) as llm:
        stats = llm._running().stats()
        assert stats.kv_budget_tokens == plan.kv_tokens < 64 * 1000
        block_bytes = 16 * plan.token_bytes
        assert stats.prefix_capacity_blocks == plan.prefix_bytes // block_bytes
    assert "memory may run out" not in caplog.text


def test_engine_that_cannot_fit_is_warned_of(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever is killed later should have read why."""
    monkeypatch.setattr(opening, "memory_found", lambda: Memory(20 * MIB, "container"))
    ortolan.load(tiny_bundle).close()
    assert "memory may run out" in caplog.text


def used(bundle: Path, **settings: Any) -> dict[str, Any]:
    """What a process that loads and fills the bundle holds; see benchmarks/plan_memory.py."""
    script = str(ROOT / "benchmarks/plan_memory.py")
    done = subprocess.run(
        [sys.executable, script, str(bundle), "--hold", json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


linux = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="only Linux says what a process has mapped"
)


@linux
def test_plan_is_what_a_tiny_model_uses(tiny_bundle: Path, tmp_path: Path) -> None:
    """Most of it is the process: a plan of weights and KV alone would be off by far."""
    settings = {"max_slots": 4, "max_context": 64, "prefix_cache_mb": 1, "threads": 2}
    found = used(tiny_bundle, cache_dir=str(tmp_path), **settings)
    assert found["total"] == pytest.approx(sum(found["filled"].values()), rel=0.1), found
    peak = sum(found["peak"].values())
    assert 0.9 * peak < found["first_load"] < 2 * peak, found


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("slots", "context"), [(4, 512), (8, 1024)])
def test_plan_is_what_the_real_model_uses(
    smollm2_bundle: Path, tmp_path: Path, slots: int, context: int
) -> None:
    """Within a tenth, weights in the page cache and full caches included; packing is bounded."""
    settings = {"max_slots": slots, "max_context": context, "prefix_cache_mb": 16, "threads": 2}
    found = used(smollm2_bundle, cache_dir=str(tmp_path), **settings)
    assert found["total"] == pytest.approx(sum(found["filled"].values()), rel=0.1), found
    packed = sum(file.stat().st_size for file in tmp_path.rglob("weights.packed"))
    assert found["packed"] == pytest.approx(packed, rel=0.01)
    assert sum(found["peak"].values()) < found["first_load"] < 2 * sum(found["peak"].values())
    # What packing took is given back: what is loaded is no larger than planned for.
    loaded = sum(found["loaded"].values())
    kv = found["plan"]["KV"] + found["plan"]["prefix cache"]
    assert loaded < found["total"] - kv
    shutil.rmtree(tmp_path)
