"""One pool for all sessions of a process, or one for each of the engines that share its threads."""

from __future__ import annotations

import dataclasses

import onnxruntime as ort
import pytest

from ortolan.errors import EngineError, ProviderError, UsageError
from ortolan.runtime.engine import opening, thread_pool
from ortolan.runtime.engine.opening import check_replicas
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import find_provider


def test_second_thread_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime would ignore it, and a benchmark would compare a number with itself."""
    monkeypatch.setattr(thread_pool, "_size", 2)
    assert thread_pool.use_threads(None) == 2
    assert thread_pool.use_threads(2) == 2
    with pytest.raises(EngineError, match=r"2 threads already.*another process"):
        thread_pool.use_threads(3)
    with pytest.raises(UsageError, match="threads is 0"):
        thread_pool.use_threads(0)


def test_engines_that_share_threads_have_pools_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a shared pool they would wait for each other at every operator."""
    monkeypatch.setattr(thread_pool, "_size", None)
    monkeypatch.setattr(thread_pool, "_engines", 1)
    monkeypatch.setattr("onnxruntime.set_global_thread_pool_sizes", pytest.fail)
    assert thread_pool.use_threads(7, 3) == 7
    options = session_options({})
    assert options.use_per_session_threads
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert thread_pool.use_threads(None) == thread_pool.use_threads(7) == 7
    with pytest.raises(EngineError, match=r"among 3 engines already.*another process"):
        thread_pool.use_threads(7, 1)
    monkeypatch.setattr(thread_pool, "_engines", 1)
    assert not session_options({}).use_per_session_threads


def test_pool_that_others_have_set_up_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that uses ONNX Runtime itself must learn why, not see a status code."""

    def taken(*sizes: int) -> None:
        raise RuntimeError("Global thread pools have already been created, cannot replace them")

    monkeypatch.setattr(thread_pool, "_size", None)
    monkeypatch.setattr("onnxruntime.set_global_thread_pool_sizes", taken)
    with pytest.raises(EngineError, match=r"global thread pool itself.*load Ortolan first"):
        thread_pool.use_threads(2)


def test_replicas_that_cannot_be_are_refused() -> None:
    check_replicas(EngineConfig(provider="quantum", threads=1), 1)
    with pytest.raises(UsageError, match="replicas is 3, and there are 2 threads"):
        check_replicas(EngineConfig(threads=2), 3)
    with pytest.raises(ProviderError, match="'quantum' is unknown"):
        check_replicas(EngineConfig(provider="quantum", threads=2), 2)


def test_replicas_are_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would hold the weights once for each, and has parallel work enough."""
    other = dataclasses.replace(find_provider("cpu", ort), name="other", ort_name="O")
    monkeypatch.setattr(opening, "configured_provider", lambda config, runtime: other)
    with pytest.raises(UsageError, match="provider other would hold the weights as many times"):
        check_replicas(EngineConfig(threads=2), 2)
