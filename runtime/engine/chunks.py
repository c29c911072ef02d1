"""Where prompts are cut, so that no cut changes a bit (rule 1a)."""

from __future__ import annotations

# Kernels work on tiles of rows: attention on 2 * head_dim at a time, 4-bit products in float32 on
# 128. Where a tile has a single row left over, it is computed by other code, to other bits. All
# these tiles are multiples of 32.
_TILE = 32


def next_chunk(tokens: int, most: int) -> int:
    """How many of the `tokens` that are left of a prompt the next prefill call reads.

    About `most` (at least 2). No piece leaves a single row over in a kernel's last tile, or is a
    single row, unless the prompt has only one token: the same token computed in company has other
    bits. The cut moves by one or two tokens where it would.
    """
    size = min(most, tokens)
    if tokens - size == 1:
        size += -1 if size > 2 else 1
    if size % _TILE == 1 and size > 1:
        size -= 2
    return size


def chunk_sizes(tokens: int, most: int) -> list[int]:
    """All the pieces of a prompt of `tokens`; see next_chunk."""
    sizes = []
    while tokens:
        sizes.append(next_chunk(tokens, most))
        tokens -= sizes[-1]
    return sizes
