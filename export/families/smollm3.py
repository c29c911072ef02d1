"""SmolLM3: layers without rotary embedding between those with it."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family, biases, window
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    given = settings.get("no_rope_layers")
    if given is not None and not isinstance(given, list):
        raise settings.unfit("no_rope_layers", given, f"a list of {layers} zeros and ones")
    interval = settings.integer("no_rope_layer_interval", 4)
    # The name says "no rope"; 1 means that the layer has it.
    turning = given or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(turning) != layers or any(turns not in (0, 1) for turns in turning):
        raise settings.unfit("no_rope_layers", given, f"a list of {layers} zeros and ones")
    return {
        "rope_layers": [bool(turns) for turns in turning],
        **biases(settings),
        **window(settings, layers, lambda layer: not turning[layer]),
    }


FAMILY = Family(name="smollm3", own=_own, tied=True, theta=2_000_000.0, sets_kv_heads=True)
