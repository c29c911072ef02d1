"""Providers of other distributions, and of plug-in libraries."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortolan.errors import ProviderError
from ortolan.runtime import providers
from ortolan.runtime.providers import Capabilities, Provider, find_provider, plugin
from ortolan.runtime.providers.plugin import PluginProvider


def runtime(*names: str) -> Any:
    """An ONNX Runtime that has these providers."""
    return SimpleNamespace(__version__="9.9", get_available_providers=lambda: list(names))


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a distribution `birds` that adds the providers of these entry points."""

    def install(module: str, **entries: str) -> None:
        (tmp_path / "birds.py").write_text(module, encoding="utf-8")
        info = tmp_path / "birds-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.2\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[ortolan.providers]\n{lines}")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(__import__("sys").modules, "birds", raising=False)

    return install


WREN = """
from ortolan.runtime.providers import Capabilities, Provider
WREN = Provider(name="wren", ort_name="WrenExecutionProvider", distribution="birds",
                capabilities=Capabilities(), remedy="pip install birds")
"""


def test_other_distribution_adds_a_provider(distribution: Any) -> None:
    distribution(WREN, wren="birds:WREN")
    provider = find_provider("wren", runtime("WrenExecutionProvider"))
    assert provider.ort_name == "WrenExecutionProvider"
    assert providers.provider_names()[-1] == "wren"


def test_typing_error_suggests_an_added_name_too(distribution: Any) -> None:
    distribution(WREN, wren="birds:WREN")
    with pytest.raises(ProviderError, match=r"did you mean wren\?"):
        find_provider("wrenn", runtime())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("birds:ROBIN", "AttributeError"),
        ("crows:WREN", "ModuleNotFoundError"),
        ("birds:Capabilities", "is a type, not an ortolan.runtime.providers.Provider"),
    ],
)
def test_broken_entry_point_is_named_and_breaks_nothing_else(
    distribution: Any, value: str, said: str
) -> None:
    """Someone else's broken package must not stop who does not use it."""
    distribution(WREN, wren=value)
    with pytest.raises(ProviderError, match=rf"provider wren of birds 1\.2.*{re.escape(said)}"):
        find_provider("wren", runtime("WrenExecutionProvider"))
    assert find_provider("cpu", runtime("CPUExecutionProvider")).name == "cpu"


def test_entry_point_cannot_replace_one_of_ours(distribution: Any) -> None:
    """A package would decide what `cpu` runs on."""
    distribution(WREN, cpu="birds:WREN")
    assert providers.provider_names().count("cpu") == 1
    assert find_provider("cpu", runtime("CPUExecutionProvider")).ort_name == "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpu", "cuda"),
        ("dml", "directml"),
        ("CUDAExecutionProvider", "cuda"),
        ("DmlExecutionProvider", "directml"),
        ("OpenVino", "openvino"),
        ("webgpuu", "webgpu"),
    ],
)
def test_other_peoples_names_lead_to_ours(name: str, near: str) -> None:
    with pytest.raises(ProviderError, match=rf"did you mean {near}\?"):
        find_provider(name, runtime())


class FakeRuntime:
    """An ONNX Runtime in which a library brings devices of these providers."""

    __version__ = "9.9"

    def __init__(self, *brings: str) -> None:
        self.brings = brings
        self.registered: list[tuple[str, str]] = []
        self.used: list[Any] = []

    def get_available_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]

    def get_ep_devices(self) -> list[Any]:
        names = ["CPUExecutionProvider", *(self.brings if self.registered else ())]
        return [SimpleNamespace(ep_name=name) for name in names]

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if self.registered:
            raise RuntimeError("already registered")
        self.registered.append((name, path))

    def InferenceSession(self, model: Any, options: Any, **given: Any) -> Any:  # noqa: N802  (theirs)
        assert "providers" not in given
        return SimpleNamespace(get_providers=lambda: [device.ep_name for device in self.used])


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(plugin, "_registered", {})
    path = tmp_path / "libwren.so"
    path.write_bytes(b"")
    return path


def test_library_brings_its_provider(library: Path) -> None:
    """Registered once for a process, whatever asks for it again."""
    ort = FakeRuntime("WrenExecutionProvider")
    provider = find_provider(str(library), ort, {"speed": 3})  # type: ignore[arg-type]
    assert isinstance(provider, PluginProvider)
    assert provider.name == "WrenExecutionProvider"
    assert provider.options == {"speed": "3"}
    # Nobody has said what it can do, so nothing is taken for granted.
    assert provider.capabilities == Capabilities(in_place_kv=False, slices=True)
    find_provider(str(library), ort)  # type: ignore[arg-type]
    ((_, path),) = ort.registered
    assert path == str(library)


def test_session_of_a_library_gets_its_device_and_options(library: Path) -> None:
    ort = FakeRuntime("WrenExecutionProvider")
    provider = find_provider(str(library), ort, {"speed": "3"})  # type: ignore[arg-type]

    def add(devices: list[Any], options: dict[str, str]) -> None:
        ort.used += devices
        assert options == {"speed": "3"}

    provider.open_session(ort, b"", SimpleNamespace(add_provider_for_devices=add))  # type: ignore[arg-type]
    assert [device.ep_name for device in ort.used] == ["WrenExecutionProvider"]


def test_library_with_a_known_provider_can_what_that_can(library: Path) -> None:
    ort = FakeRuntime("WebGpuExecutionProvider")
    provider = find_provider(str(library), ort, {"validationMode": "full"})  # type: ignore[arg-type]
    ours: Provider = providers.load_provider("webgpu")
    assert provider.capabilities == ours.capabilities
    assert provider.device == "webgpu"
    # A library is given its options under their short names.
    assert provider.option_prefix == ""


def test_library_with_several_needs_a_name(library: Path) -> None:
    ort = FakeRuntime("WrenExecutionProvider", "RobinExecutionProvider")
    with pytest.raises(ProviderError, match="brings RobinExecutionProvider, WrenExecutionProvider"):
        find_provider(str(library), ort)  # type: ignore[arg-type]
    provider = find_provider(f"WrenExecutionProvider={library}", ort)  # type: ignore[arg-type]
    assert provider.ort_name == "WrenExecutionProvider"
    with pytest.raises(ProviderError, match=r"no device for Owl.*some for RobinExecutionProvider"):
        find_provider(f"Owl={library}", ort)  # type: ignore[arg-type]


def test_library_without_a_device_is_no_provider(library: Path) -> None:
    """As with a plug-in for hardware that is not in this machine."""
    with pytest.raises(ProviderError, match="lists no device on this machine; is its hardware"):
        find_provider(str(library), FakeRuntime())  # type: ignore[arg-type]


def test_library_that_is_missing_or_none_is_named(library: Path) -> None:
    with pytest.raises(ProviderError, match=r"there is no library /nowhere/lib\.so"):
        find_provider("/nowhere/lib.so", FakeRuntime())  # type: ignore[arg-type]
    broken = FakeRuntime("WrenExecutionProvider")
    broken.registered.append(("other", "other"))
    with pytest.raises(ProviderError, match=r"9\.9 cannot load .*libwren\.so: already registered"):
        find_provider(str(library), broken)  # type: ignore[arg-type]
    with pytest.raises(ProviderError, match=r"9\.9 loads no libraries; install 1\.23"):
        find_provider(str(library), runtime())
    with pytest.raises(ProviderError, match="has no name before ="):
        find_provider(f"={library}", FakeRuntime())  # type: ignore[arg-type]


def test_file_that_is_no_library_is_refused_by_the_real_runtime(tmp_path: Path) -> None:
    import onnxruntime

    path = tmp_path / "libwren.so"
    path.write_bytes(b"not a library")
    with pytest.raises(ProviderError, match=r"cannot load .*libwren\.so"):
        find_provider(str(path), onnxruntime)
