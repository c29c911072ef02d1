"""A provider that cannot run is an error with a remedy, never a silent fall-back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ortolan.errors import ProviderError
from ortolan.runtime import providers
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
