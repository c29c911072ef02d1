"""What of ONNX Runtime is installed here, and which providers work, or why not."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ortolan.errors import ProviderError
from ortolan.runtime.providers import load_provider, provider_names
from ortolan.runtime.providers.base import Provider
from ortolan.runtime.providers.probe import Probed, probe

State = Literal["usable", "fails", "not here"]


@dataclass(frozen=True)
class Installed:
    """A distribution that brings the module `onnxruntime`, and the folder it brings it to."""

    name: str
    version: str
    folder: str


@dataclass(frozen=True)
class ProviderState:
    """reason: why it is not usable. command: what would make it so, if one command does."""

    name: str
    ort_name: str
    state: State
    reason: str = ""
    command: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """version: of the module, None without one. problems: sentences, each with its remedy."""

    version: str | None
    installed: tuple[Installed, ...]
    problems: tuple[str, ...]
    providers: tuple[ProviderState, ...] = field(default=())


Probe = Callable[[str, Mapping[str, Any] | None], Probed]


def survey(
    only: str | None = None, options: Mapping[str, Any] | None = None, run: Probe = probe
) -> Survey:
    """Look at everything, or at one provider alone, which may be a plug-in library.

    options: a user's, for that one. Works without ONNX Runtime, too.
    Raises ProviderError for an unknown name.
    """
    found = installed_runtimes()
    module, broken = _module()
    problems = runtime_problems(found, module)
    if broken and not problems:
        problems.append(_import_problem(broken, found))
    names = provider_names() if only is None else [only]
    states = [_state(name, options, module, found, run) for name in names]
    version = None if module is None else str(module.__version__)
    return Survey(version, tuple(found), tuple(problems), tuple(states))


def installed_runtimes() -> list[Installed]:
    """All distributions that claim the folder `onnxruntime`, in the order of the import path."""
    found = {}
    for dist in metadata.distributions():
        name = dist.metadata["Name"] or ""
        if not name.lower().startswith(("onnxruntime", "ort")):
            continue
        if any(file.as_posix() == "onnxruntime/__init__.py" for file in dist.files or ()):
            folder = os.path.realpath(str(dist.locate_file("onnxruntime")))
            found[name.lower(), folder] = Installed(name, dist.version, folder)
    return list(found.values())


def runtime_problems(found: list[Installed], module: ModuleType | None) -> list[str]:
    """A sentence for each way in which the distributions are in each other's way.

    They share one folder: the one installed last has overwritten files of the others, and removing
    any takes files from all.
    """
    problems = []
    for folder in dict.fromkeys(one.folder for one in found):
        here = [one for one in found if one.folder == folder]
        names = " and ".join(f"{one.name} {one.version}" for one in here)
        keep = f"pip install --force-reinstall --no-deps {here[0].name}=={here[0].version}"
        if len(here) > 1:
            last = getattr(module, "package_name", None) if _lies_in(module, folder) else None
            whose = f", with files of {last}" if last else ""
            every = " ".join(one.name for one in here)
            problems.append(
                f"{names} are installed over each other in one folder{whose}; keep one: "
                f"pip uninstall -y {every} && pip install {last or here[0].name}"
            )
        elif not (Path(folder) / "__init__.py").is_file():
            problems.append(
                f"{names} is recorded as installed, but its files are gone, as happens when "
                f"another one is removed; {keep}"
            )
        elif _lies_in(module, folder) and module.__version__ != here[0].version:  # type: ignore[union-attr]  # _lies_in says that there is one
            problems.append(
                f"{names} is recorded as installed, but its files are of "
                f"{getattr(module, 'package_name', 'onnxruntime')} {module.__version__}; {keep}"  # type: ignore[union-attr]  # the same
            )
    return problems


def _lies_in(module: ModuleType | None, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(Path(file).parent) == folder


def _module() -> tuple[ModuleType | None, str]:
    """The module, or None and why it cannot be imported ("" where it simply is not there)."""
    try:
        if importlib.util.find_spec("onnxruntime") is None:
            return None, ""
        import onnxruntime
    except Exception as exc:  # noqa: BLE001  (a damaged install raises anything)
        return None, f"{type(exc).__name__}: {exc}"
    if not hasattr(onnxruntime, "InferenceSession"):
        return None, f"the folder {next(iter(onnxruntime.__path__))} holds no onnxruntime"
    module: ModuleType = onnxruntime
    return module, ""


def _import_problem(broken: str, found: list[Installed]) -> str:
    names = " ".join(f"{one.name}=={one.version}" for one in found) or "onnxruntime"
    return (
        f"onnxruntime cannot be imported ({broken}); pip install --force-reinstall --no-deps "
        f"{names}"
    )


def _state(
    name: str,
    options: Mapping[str, Any] | None,
    module: ModuleType | None,
    found: list[Installed],
    run: Probe,
) -> ProviderState:
    from ortolan.runtime.providers.plugin import is_library

    if is_library(name):
        if module is None:
            return ProviderState(name, "", "not here", "there is no onnxruntime", _install("cpu"))
        return _probed(name, name, "", run(name, options))
    try:
        provider = load_provider(name)
    except ProviderError as exc:
        if name not in provider_names():
            raise
        return ProviderState(name, "", "fails", str(exc))
    if module is not None and provider.ort_name in module.get_available_providers():
        return _probed(name, provider.ort_name, provider.hint, run(name, options))
    if provider.systems and sys.platform not in provider.systems:
        reason = f"there is no {provider.distribution} for {sys.platform}; {provider.remedy}"
        return ProviderState(name, provider.ort_name, "not here", reason)
    if module is None and found:  # pip would leave it as it is: the problem has the command
        damaged = ", ".join(f"{one.name} {one.version}" for one in found)
        return ProviderState(name, provider.ort_name, "not here", f"{damaged} is damaged")
    if module is None:
        reason = "there is no onnxruntime"
    else:
        what = ", ".join(f"{one.name} {one.version}" for one in found) or "this onnxruntime"
        reason = f"it is in {provider.distribution}, and {what} is installed"
    return ProviderState(
        name, provider.ort_name, "not here", reason, install_command(provider, module is None)
    )


def _probed(name: str, ort_name: str, hint: str, found: Probed) -> ProviderState:
    if found.usable:
        return ProviderState(name, ort_name, "usable", devices=found.devices)
    # The error that open_session raises ends with the hint already.
    reason = found.reason if not hint or hint in found.reason else f"{found.reason}; {hint}"
    return ProviderState(name, ort_name, "fails", reason, devices=found.devices)


def install_command(provider: Provider, alone: bool) -> str:
    """The command that makes a provider usable, to be run in Ortolan's clone.

    alone: no other distribution is in this environment; otherwise it gets one of its own, since
    they overwrite each other.
    """
    if not provider.extra:
        return f"pip install {provider.distribution}"
    if alone:
        return _install(provider.extra)
    folder = f".venv-{provider.extra}"
    if sys.platform == "win32":
        return f"python -m venv {folder} && {folder}\\Scripts\\{_install(provider.extra)}"
    return f"python -m venv {folder} && {folder}/bin/{_install(provider.extra)}"


def _install(extra: str) -> str:
    return f"pip install .[{extra}]" if sys.platform == "win32" else f"pip install '.[{extra}]'"
