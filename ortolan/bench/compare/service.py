"""What a process of a provider's environment does: open the bundle, run cases.

Imported by name from the environment that asks, which may have no ONNX Runtime at all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan.bench.cases import Case, Sample

if TYPE_CHECKING:
    from ortolan.bench.measure import Bench


class ProviderService:
    """Made in a child process, one for each provider and number of threads; see worker.Worker.

    warnings: what opening the bundle there made the runtime say, such as that a self-test failed.
    """

    def __init__(self, bundle: Path, engine: dict[str, Any], cases: Sequence[Case]) -> None:
        from ortolan.optional import require

        require("onnxruntime", "cpu", "running a model")
        heard = _Heard(logging.WARNING)
        logging.getLogger("ortolan").addHandler(heard)
        self._bench = _open(bundle, engine, cases)
        self._warnings = heard.texts

    def describe(self) -> dict[str, Any]:
        """The provider as it was opened: where its KV lies, and what the runtime warned of."""
        provider = self._bench.opened.provider
        return {
            "ort_name": provider.ort_name,
            "device": provider.device,
            "warnings": list(dict.fromkeys(self._warnings)),
        }

    def run(self, case: Case) -> Sample:
        return self._bench.run(case)


def _open(bundle: Path, engine: dict[str, Any], cases: Sequence[Case]) -> Bench:
    from ortolan.bench.measure import Bench
    from ortolan.runtime.params import EngineConfig

    return Bench(bundle, EngineConfig(**engine), cases)


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
