"""The provider under test, the bundles that were made for it, and the CPU's answers.

Only `make test-providers` sets the environment for these tests: elsewhere nothing of the folder
is collected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BUNDLES = os.environ.get("ORTOLAN_PROVIDER_BUNDLES", "")
collect_ignore_glob = [] if BUNDLES else ["test_*.py"]

# SmolLM2 takes 10 s a step on a device in software, and SwiftShader has no float16 at all.
_LEFT_OUT = {"openvino": {"float16"}, "webgpu": {"smollm2", "float16"}}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that names a `bundle` is made for each."""
    if "bundle" in metafunc.fixturenames:
        names = sorted(path.parent.name for path in Path(BUNDLES).glob("*/manifest.json"))
        left_out = _LEFT_OUT.get(os.environ["ORTOLAN_PROVIDER"], set())
        names = [name for name in names if name not in left_out]
        metafunc.parametrize("bundle", [Path(BUNDLES) / name for name in names], ids=names)


@pytest.fixture(scope="session")
def provider() -> str:
    """The name of the provider under test."""
    return os.environ["ORTOLAN_PROVIDER"]


@pytest.fixture(scope="session")
def tiny() -> Path:
    """A bundle for tests that need only one."""
    return Path(BUNDLES) / "q4_1"


@pytest.fixture(scope="session")
def expected() -> Callable[[Path], dict[str, Any]]:
    """The CPU's answers on a bundle by scenario."""
    return lambda bundle: json.loads(bundle.with_name(f"{bundle.name}.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def opened(provider: str) -> Iterator[Callable[..., Any]]:
    """Opens a bundle on the provider; the last one stays open for the next test that wants it."""
    from provider_scenarios import SETTINGS

    from ortolan.runtime.bundle import Bundle
    from ortolan.runtime.llm import LLM
    from ortolan.runtime.params import EngineConfig

    last: dict[tuple[Path, str], LLM] = {}

    def close() -> None:
        while last:
            last.popitem()[1].close()

    def open_on_provider(bundle: Path, **settings: Any) -> LLM:
        key = (bundle, repr(settings))
        if key not in last:
            close()
            config = EngineConfig(**{**SETTINGS, "provider": provider, **settings})
            last[key] = LLM(Bundle.open(bundle), config)
        return last[key]

    yield open_on_provider
    close()
