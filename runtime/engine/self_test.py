"""What a device computes is checked before anybody leans on it.

Some kernels are wrong on some devices, and say nothing. What can be done another way is done so,
with a warning; nothing here compares with other providers (that is `ortolan verify`).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ortolan.runtime.engine.device_logits import FloatArray, on_host
from ortolan.runtime.engine.device_model import DeviceModel

logger = logging.getLogger(__name__)

# Longer than the pieces in which attention was seen to go wrong. With a sliding window of five,
# five tokens came out wrong and twelve did not.
_TOKENS = 12
_FEWER = 5
_MOST_DIFFERENCE = 0.05  # of the logits' norm; rounding of activations makes far less


def limit_prefill(model: DeviceModel[Any]) -> None:
    """Have prompts read token by token where the provider gets several at a time wrong.

    Seen with WebGPU on devices with small subgroups, where attention over more than one token is
    wrong as soon as there are four.
    """
    declared = model.most_prefill_tokens
    if declared == 1:
        return
    counts = [min(count, model.cache.capacity) for count in (_FEWER, _TOKENS)]
    whole = [_read(model, 0, count) for count in counts]
    model.most_prefill_tokens = 1
    if all(_alike(found, _read(model, 0, n)) for found, n in zip(whole, counts, strict=True)):
        model.most_prefill_tokens = declared
        return
    logger.warning(
        "attention over several tokens at a time is wrong on this device, so prompts are read "
        "token by token",
        extra={"provider": model.device.provider.name},
    )


def decodes_ragged_rows(model: DeviceModel[Any]) -> bool:
    """Whether rows of different lengths come out of one decode call as they do alone."""
    lengths = [min(_TOKENS, model.cache.capacity - 1), _FEWER]
    if model.cache.slots < 2 or lengths[0] <= lengths[1]:
        return True
    alone = [_read(model, slot, length + 1) for slot, length in enumerate(lengths)]
    for slot, length in enumerate(lengths):
        _read(model, slot, length)
    ids = [_ids(model, length + 1)[-1] for length in lengths]
    together = on_host(model.decode(0, ids, lengths))
    if all(_alike(row, other) for row, other in zip(together, alone, strict=True)):
        return True
    logger.warning(
        "rows of different lengths decode wrongly together on this device, so each is decoded "
        "on its own",
        extra={"provider": model.device.provider.name},
    )
    return False


def _ids(model: DeviceModel[Any], count: int) -> list[int]:
    return [7 * (place + 1) % model.config.vocab_size for place in range(count)]


def _read(model: DeviceModel[Any], slot: int, count: int) -> FloatArray:
    """Logits [vocab] after the first tokens of the prompt."""
    logits = on_host(model.prefill(slot, [_ids(model, count)], [0], [[count - 1]]))
    row: FloatArray = logits[0, 0].copy()
    return row


def _alike(found: FloatArray, wanted: FloatArray) -> bool:
    difference = np.linalg.norm(found - wanted)
    return bool(difference <= _MOST_DIFFERENCE * np.linalg.norm(wanted))
