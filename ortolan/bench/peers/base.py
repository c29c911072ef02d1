"""What a peer answers, and how one is named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ortolan.bench.cases import Case, Sample
from ortolan.errors import UsageError


class Peer(Protocol):
    """Another engine on its own form of the model. Raises BenchError when it cannot run.

    Warm-up is the peer's own business; a sample holds none of it.
    """

    name: str
    version: str
    note: str  # what is different from our side of a ratio

    def supports(self, case: Case) -> bool:
        """Whether this peer can run that case."""
        ...

    def run(self, case: Case) -> Sample:
        """One sample of the case."""
        ...

    def close(self) -> None:
        """End what runs for it."""
        ...


def open_peer(spec: str, llama_bin: Path | None) -> Peer:
    """The peer that "NAME:PATH" names: llama.cpp:FILE.gguf, genai:FOLDER or openvino:FILE.

    Raises UsageError for another name or a path that is not there, BenchError or
    MissingDependencyError for a peer that is not installed.
    """
    name, colon, place = spec.partition(":")
    if name not in ("llama.cpp", "genai", "openvino") or not colon or not place:
        raise UsageError(
            f"--against {spec!r} is none of llama.cpp:FILE.gguf, genai:FOLDER and openvino:FILE"
        )
    path = Path(place)
    if not path.exists():
        raise UsageError(f"--against {spec}: there is no {path}")
    if name == "llama.cpp":
        from ortolan.bench.peers.llama_cpp import LlamaCpp

        return LlamaCpp(path, llama_bin)
    if name == "genai":
        from ortolan.bench.peers.genai import Genai

        return Genai(path)
    from ortolan.bench.peers.openvino import OpenVino

    return OpenVino(path)
