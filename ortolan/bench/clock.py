"""How long ONNX Runtime's decoder sessions took, whoever called them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort


@dataclass
class SessionClock:
    """Seconds that each run of a session with a KV cache took, in order."""

    runs_s: list[float] = field(default_factory=list)
    _decoders: dict[int, bool] = field(default_factory=dict)

    def counts(self, session: Any) -> bool:
        """Whether this is a decoder's session; the sampling graph's is not."""
        found = self._decoders.get(id(session))
        if found is None:
            names = [value.name for value in session.get_inputs()]
            found = any(name.startswith("past_key_values") for name in names)
            self._decoders[id(session)] = found
        return found


@contextmanager
def session_clock() -> Iterator[SessionClock]:
    """Time every run of a decoder's session in this process, while the context is open.

    It stands in onnxruntime's class itself, so that it does not matter how the engine is built.
    """
    clock = SessionClock()
    original = ort.InferenceSession.run_with_iobinding

    def timed(session: Any, *args: Any, **kwargs: Any) -> Any:
        began_ns = time.perf_counter_ns()
        result = original(session, *args, **kwargs)
        took_ns = time.perf_counter_ns() - began_ns
        if clock.counts(session):
            clock.runs_s.append(took_ns * 1e-9)
        return result

    ort.InferenceSession.run_with_iobinding = timed
    try:
        yield clock
    finally:
        ort.InferenceSession.run_with_iobinding = original
