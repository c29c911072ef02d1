"""What a GGUF file costs to read."""

from __future__ import annotations

from pathlib import Path

from ortolan.errors import BenchError


def bytes_per_token(gguf: Path) -> int:
    """Bytes of weights that a decode step of one row reads: all but a table that is only looked up.

    Raises BenchError where the gguf package is missing.
    """
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise BenchError("the package gguf is not installed") from None
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(gguf).tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return sum(sizes.values())
