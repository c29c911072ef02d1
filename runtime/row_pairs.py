"""Which products compute rows two at a time, so that one left over has other bits (rule 1d).

In ONNX Runtime 1.32 on x86-64 these are all products of blocks at exact accuracy, which compute in
float32, and those of large blocks at default accuracy. Found by comparing each row of 1 to 300
with the same row among 300, for blocks of 16 to 256; held by tests/runtime/engine/test_pairs.py.
"""

from __future__ import annotations

import re

from ortolan.graphs.manifest import Manifest
from ortolan.runtime.params import EngineConfig

_BLOCKS = re.compile(r"int(4|8) block (\d+)")
# By bits of the codes, the least block whose products are computed so at default accuracy.
_LEAST_BLOCK = {4: 64, 8: 128}


def computes_pairs(manifest: Manifest, config: EngineConfig) -> bool:
    """Whether a call should have an even number of rows, tokens or logits, for all to be paired."""
    return config.accuracy == "exact" or any(
        int(block) >= _LEAST_BLOCK[int(bits)]
        for group in manifest.weights
        for bits, block in _BLOCKS.findall(group.precision)
    )


def row_multiple(manifest: Manifest, config: EngineConfig) -> int:
    """What the rows of a decode call have to be a multiple of: 1 or 2.

    An engine of one slot decodes one row always, so nothing need be paired there at default
    accuracy; at exact accuracy results are compared with those of other engines.
    """
    alone = config.max_slots == 1 and config.accuracy != "exact"
    return 2 if computes_pairs(manifest, config) and not alone else 1


def positions_of_slot(manifest: Manifest, config: EngineConfig, context: int) -> int:
    """Positions for `context` tokens: one more where a prompt's last piece is padded to be even."""
    return context + 1 if computes_pairs(manifest, config) else context


def rows_of_cache(manifest: Manifest, config: EngineConfig) -> int:
    """Slots of the KV cache: those that are asked for, and an idle one where rows are paired."""
    multiple = row_multiple(manifest, config)
    return -(-config.max_slots // multiple) * multiple
