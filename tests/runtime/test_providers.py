"""A provider that cannot run is an error with a remedy, never a silent fall-back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ortolan.errors import EngineError, ProviderError, UsageError
from ortolan.runtime import providers
from ortolan.runtime.engine import thread_pool
from ortolan.runtime.machine import usable_cores
from ortolan.runtime.params import EngineConfig


def runtime(*names: str) -> SimpleNamespace:
    """An ONNX Runtime that has these providers."""
    return SimpleNamespace(__version__="9.9", get_available_providers=lambda: list(names))


def test_known_provider_is_found() -> None:
    provider = providers.find_provider("cpu", runtime("CPUExecutionProvider"))  # type: ignore[arg-type]
    assert provider.ort_name == "CPUExecutionProvider"


def test_typing_error_suggests_the_nearest_name() -> None:
    with pytest.raises(ProviderError, match=r"'cpuu' is unknown; did you mean cpu\?"):
        providers.find_provider("cpuu", runtime())  # type: ignore[arg-type]


def test_unknown_provider_lists_the_known() -> None:
    with pytest.raises(ProviderError, match="'quantum' is unknown; known are: cpu"):
        providers.find_provider("quantum", runtime())  # type: ignore[arg-type]


def test_provider_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(ProviderError, match=r"has no CPUExecutionProvider.*pip install"):
        providers.find_provider("cpu", runtime("OtherProvider"))  # type: ignore[arg-type]


def test_second_thread_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime would ignore it, and a benchmark would compare a number with itself."""
    monkeypatch.setattr(thread_pool, "_size", 2)
    assert thread_pool.use_threads(None) == 2
    assert thread_pool.use_threads(2) == 2
    with pytest.raises(EngineError, match=r"2 threads already.*another process"):
        thread_pool.use_threads(3)
    with pytest.raises(UsageError, match="threads is 0"):
        thread_pool.use_threads(0)


def test_pool_that_others_have_set_up_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that uses ONNX Runtime itself must learn why, not see a status code."""

    def taken(*sizes: int) -> None:
        raise RuntimeError("Global thread pools have already been created, cannot replace them")

    monkeypatch.setattr(thread_pool, "_size", None)
    monkeypatch.setattr("onnxruntime.set_global_thread_pool_sizes", taken)
    with pytest.raises(EngineError, match=r"global thread pool itself.*load Ortolan first"):
        thread_pool.use_threads(2)


def test_usable_cores_respect_the_containers_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """More threads than the quota allows wait for each other at every operator."""
    folder = tmp_path_factory.mktemp("cgroup")
    monkeypatch.setattr("ortolan.runtime.machine._CGROUP", folder)
    monkeypatch.setattr("ortolan.runtime.machine._CPUS", folder)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == 8
    (folder / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == 8
    (folder / "cpu.max").write_text("250000 100000\n")
    assert usable_cores() == 3
    (folder / "cpu.max").write_text("1000 100000\n")
    assert usable_cores() == 1


def test_hyperthreads_of_a_core_count_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A thread on each of them would share one core's vector units, and wait at every operator."""
    folder = tmp_path_factory.mktemp("cpus")
    monkeypatch.setattr("ortolan.runtime.machine._CGROUP", folder)
    monkeypatch.setattr("ortolan.runtime.machine._CPUS", folder)
    for cpu in range(8):
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 4, 5}, raising=False)
    assert usable_cores() == 2


def test_openvinos_threads_follow_the_settings() -> None:
    """Its pool is its own: with all cores, --threads 1 in a shared container would be ignored."""
    runtime_ = runtime("OpenVINOExecutionProvider")
    for options, threads in (({}, "3"), ({"num_of_threads": "5"}, "5")):
        config = EngineConfig(provider="openvino", threads=3, provider_options=options)
        found = providers.configured_provider(config, runtime_)  # type: ignore[arg-type]
        assert found.options["num_of_threads"] == threads
    cpu = providers.configured_provider(EngineConfig(), runtime("CPUExecutionProvider"))  # type: ignore[arg-type]
    assert not cpu.options


def test_onnxruntimes_own_fall_back_is_switched_off() -> None:
    """Its sessions start again on the CPU where a provider fails, and print a line about it."""
    given: dict[str, Any] = {}

    def session(model: bytes, options: Any, **settings: Any) -> Any:
        given.update(settings)
        return SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])

    ort: Any = SimpleNamespace(__version__="9.9", InferenceSession=session)
    provider = providers.load_provider("cpu")
    provider.open_session(ort, b"", SimpleNamespace())
    assert given["enable_fallback"] == 0
