"""SmolLM3: layers without rotary embedding between those with it."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import Family, biases, window
from ortolan.export.settings import Settings


def _own(settings: Settings, layers: int) -> dict[str, Any]:
    given = settings.get("no_rope_layers")
    interval = settings.integer("no_rope_layer_interval", 4)
    # The name says "no rope"; 1 means that the layer has it.
    turning = given or [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(turning, list) or len(turning) != layers or set(turning) - {0, 1}:
        raise settings.unfit("no_rope_layers", given, f"a list of {layers} zeros and ones")
    return {
        "rope_layers": [bool(turns) for turns in turning],
        **biases(settings),
        **window(settings, layers),
    }


FAMILY = Family(name="smollm3", own=_own)
