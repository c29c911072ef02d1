"""What is installed, and what to do about it: the sentences that save an afternoon."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ortolan.errors import ProviderError
from ortolan.runtime.providers import load_provider, survey
from ortolan.runtime.providers.probe import Probed, plain_reason, probe
from ortolan.runtime.providers.survey import Installed, install_command


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without any onnxruntime, to install some into."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    return tmp_path


def install(site: Path, name: str, version: str) -> None:
    """What pip leaves: metadata and a list of files; the files are written by `put_module`."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("onnxruntime/__init__.py,,\n")


def put_module(site: Path, name: str, version: str, *available: str) -> None:
    """The module, as the distribution installed last has left it."""
    (site / "onnxruntime").mkdir(exist_ok=True)
    (site / "onnxruntime" / "__init__.py").write_text(
        f"package_name, __version__ = {name!r}, {version!r}\n"
        f"InferenceSession = object\n"
        f"def get_available_providers(): return {list(available)!r}\n"
    )


def asked(name: str, options: Mapping[str, Any] | None) -> Probed:
    """A probe that finds everything in order."""
    return Probed(True, devices=("a bird",))


def look(only: str | None = None) -> survey.Survey:
    return survey.survey(only, run=asked)


def states(found: survey.Survey) -> dict[str, str]:
    return {one.name: one.state for one in found.providers}


def test_without_onnx_runtime_everything_has_its_command(site: Path) -> None:
    """Who has installed the plain package asks this first."""
    found = look()
    assert found.version is None
    assert set(states(found).values()) == {"not here"}
    commands = {one.name: one.command for one in found.providers}
    assert commands["openvino"].startswith("pip install ")
    assert ".[openvino]" in commands["openvino"]
    assert not found.problems


def test_other_distributions_go_into_environments_of_their_own(site: Path) -> None:
    """They would overwrite the one that is here."""
    install(site, "onnxruntime", "1.32.0")
    put_module(site, "onnxruntime", "1.32.0", "CPUExecutionProvider")
    found = look()
    assert found.version == "1.32.0"
    assert found.installed == (Installed("onnxruntime", "1.32.0", str(site / "onnxruntime")),)
    cpu, cuda = found.providers[:2]
    assert (cpu.state, cpu.devices, cpu.command) == ("usable", ("a bird",), "")
    assert cuda.reason == "it is in onnxruntime-gpu, and onnxruntime 1.32.0 is installed"
    assert cuda.command.startswith("python -m venv .venv-cuda && .venv-cuda")
    assert not found.problems


def test_package_for_windows_is_not_offered_elsewhere(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    (directml,) = look("directml").providers
    assert directml.command == ""
    assert "there is no onnxruntime-directml for linux" in directml.reason
    monkeypatch.setattr(sys, "platform", "win32")
    (directml,) = look("directml").providers
    assert directml.command == "pip install .[directml]"
    command = install_command(load_provider("cuda"), alone=False)
    assert command == "python -m venv .venv-cuda && .venv-cuda\\Scripts\\pip install .[cuda]"


def test_two_over_each_other_are_found(site: Path) -> None:
    """The commonest fault: both are `installed`, and one's files are gone."""
    install(site, "onnxruntime", "1.32.0")
    install(site, "onnxruntime-gpu", "1.31.1")
    put_module(site, "onnxruntime", "1.32.0", "CPUExecutionProvider")
    (problem,) = look().problems
    assert "onnxruntime 1.32.0" in problem
    assert "onnxruntime-gpu 1.31.1" in problem
    assert "are installed over each other in one folder, with files of onnxruntime;" in problem
    assert problem.count("pip uninstall -y") == 1
    assert problem.endswith("&& pip install onnxruntime")


def test_files_of_another_version_are_found(site: Path) -> None:
    """One of two was removed by hand, or an editable build lies in the way."""
    install(site, "onnxruntime-gpu", "1.31.1")
    put_module(site, "onnxruntime", "1.32.0", "CPUExecutionProvider")
    (problem,) = look().problems
    assert "onnxruntime-gpu 1.31.1 is recorded as installed, but its files are of" in problem
    assert "pip install --force-reinstall --no-deps onnxruntime-gpu==1.31.1" in problem


def test_files_that_went_with_another_are_found(site: Path) -> None:
    """`pip uninstall onnxruntime` takes files of onnxruntime-gpu with it."""
    install(site, "onnxruntime-gpu", "1.31.1")
    (site / "onnxruntime" / "capi").mkdir(parents=True)
    found = look()
    (problem,) = found.problems
    assert "its files are gone" in problem
    assert {one.reason for one in found.providers if one.name != "directml"} == {
        "onnxruntime-gpu 1.31.1 is damaged"
    }


def test_module_that_cannot_be_imported_is_named(site: Path) -> None:
    install(site, "onnxruntime", "1.32.0")
    (site / "onnxruntime").mkdir()
    (site / "onnxruntime" / "__init__.py").write_text("import libcublas_is_missing\n")
    (problem,) = look().problems
    assert "cannot be imported (ModuleNotFoundError: No module named 'libcublas" in problem


def test_provider_that_fails_says_what_to_look_at(site: Path) -> None:
    install(site, "onnxruntime-webgpu", "1.27.0")
    put_module(site, "onnxruntime-webgpu", "1.27.0", "WebGpuExecutionProvider")

    def fails(name: str, options: Mapping[str, Any] | None) -> Probed:
        return Probed(False, "no adapter")

    (webgpu,) = survey.survey("webgpu", run=fails).providers
    assert webgpu.state == "fails"
    assert webgpu.reason.startswith("no adapter; on Linux it needs libvulkan.so.1")


def test_broken_entry_point_is_a_row_of_its_own(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = site / "birds-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[ortolan.providers]\nwren = crows:WREN\n")
    found = look()
    assert states(found)["wren"] == "fails"
    assert states(found)["cpu"] == "not here"
    assert "provider wren of birds 1.2 cannot be loaded" in found.providers[-1].reason


def test_unknown_name_is_an_error(site: Path) -> None:
    with pytest.raises(ProviderError, match="did you mean openvino"):
        look("opnvino")


def test_cpu_is_tried_for_real() -> None:
    found = probe("cpu")
    assert found.usable, found.reason
    assert found.reason == ""


def test_process_that_dies_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may end it, which must not end the command that asks."""
    module: ModuleType = sys.modules["ortolan.runtime.providers.probe"]
    monkeypatch.setattr(module, "_child", lambda path: "import os; os._exit(9)")
    found = probe("cpu")
    assert found == Probed(False, "its process ended without an answer (exit status 9)")


def test_provider_that_this_runtime_lacks_is_a_reason() -> None:
    found = probe("directml")
    assert not found.usable
    assert "has no DmlExecutionProvider" in found.reason


@pytest.mark.parametrize(
    ("reason", "log", "plain"),
    [
        (
            "/src/webgpu_context.cc:65 void f() status == 1 was false. Failed to get an adapter",
            "Warning: Couldn't load Vulkan: libvulkan.so.1: cannot open shared object file: No",
            "Failed to get an adapter; Couldn't load Vulkan: libvulkan.so.1: cannot open shared "
            "object file: No",
        ),
        (
            "onnxruntime 9 could not set up X here, as its log says; look at it",
            "\x1b[1;31m2026-01-01 [E:onnxruntime:Default, a.cc:1 f] /src/a.cc:2 f() [ERROR] [X] no "
            "GPU\n\x1b[m",
            "onnxruntime 9 could not set up X here: [X] no GPU; look at it",
        ),
        (
            "it failed",
            "2026-01-01 [E:onnxruntime:Default, b.cc:1 g] /src/b.cc:3 g() [ONNXRuntimeError] : 1 : "
            "FAIL : Failed to load library /usr/lib/ort/libx.so with error: liby.so: cannot open\n",
            "it failed; Failed to load library libx.so with error: liby.so: cannot open",
        ),
        ("it failed", "something else\n", "it failed"),
    ],
)
def test_reason_is_what_a_person_can_use(reason: str, log: str, plain: str) -> None:
    """The places in ONNX Runtime's source code fill a screen and say nothing."""
    assert plain_reason(reason, log) == plain
