"""What an installed Ortolan holds, shows, and says when an optional package is missing."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

import ortolan
from ortolan.errors import MissingDependencyError
from ortolan.optional import require

RunCli = Callable[..., subprocess.CompletedProcess[str]]

# Import names of everything that an extra brings, and nothing that the base install has.
OPTIONAL = (
    "gguf",
    "google",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "httptools",
    "huggingface_hub",
    "ml_dtypes",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "safetensors",
    "starlette",
    "uvicorn",
)


@pytest.fixture(scope="session")
def wheel(root: Path, pyproject: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree.

    Built from a copy: setuptools would leave a build/lib behind, and put what an earlier build
    left there into the wheel, deleted modules included.
    """
    tree = tmp_path_factory.mktemp("tree")
    for folder in pyproject["tool"]["setuptools"]["package-dir"].values():
        shutil.copytree(root / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in root.iterdir():
        if file.is_file():
            shutil.copy(file, tree)
    run([sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", tree], cwd=tree)
    (built,) = (tree / "dist").glob("*.whl")
    return built


def run(command: list[str | Path], cwd: Path | None = None) -> str:
    """The command's standard output; a non-zero exit status fails the test with all it said."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_folder_with_modules_is_listed_as_a_package(
    source_modules: Mapping[str, Path], pyproject: dict[str, Any]
) -> None:
    """A package missing from the list works in the editable install and is not in the wheel."""
    found = {
        module if file.name == "__init__.py" else module.rpartition(".")[0]
        for module, file in source_modules.items()
    }
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(found)


def test_wheel_holds_every_module_and_data_file_of_the_tree(
    wheel: Path, root: Path, pyproject: dict[str, Any]
) -> None:
    """What is missing here is missing for everybody who does not work in a clone."""
    expected = set()
    for package, folder in pyproject["tool"]["setuptools"]["package-dir"].items():
        for file in (root / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("."):
                expected.add(f"{package.replace('.', '/')}/{file.relative_to(root / folder)}")
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(held) == sorted(expected)


@pytest.mark.slow
def test_plain_install_passes_mypy_strict(
    wheel: Path,
    root: Path,
    source_modules: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Type checkers do not see through an editable install and then pass while checking nothing.

    So this checks an unpacked wheel, from another folder, and counts the files checked.
    """
    monkeypatch.delenv("MYPYPATH", raising=False)
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    said = run(
        [
            *(sys.executable, "-P", "-m", "mypy", "--config-file", root / "pyproject.toml"),
            *("--cache-dir", root / "build" / "mypy-cache", "-p", "ortolan"),
        ],
        cwd=tmp_path,
    )
    checked = re.search(r"no issues found in (\d+) source files", said)
    assert checked, said
    # A folder of data inside a package counts as one more, though there is nothing to check in it.
    folders = [path for path in (tmp_path / "ortolan").rglob("*") if path.is_dir()]
    data = [path for path in folders if not (path / "__init__.py").exists()]
    assert int(checked[1]) - len(data) == len(source_modules)


@pytest.mark.parametrize("name", ortolan.__all__)
def test_public_name_resolves(name: str) -> None:
    """`ortolan.X` is promised; a name that moved must not first be missed by a user."""
    assert getattr(ortolan, name) is not None


def test_public_names_show_before_they_are_used() -> None:
    """Completion in a shell reads dir(), where a name not yet imported would be missing."""
    shown = "import ortolan; print(set(ortolan.__all__) - set(dir(ortolan)))"
    assert run([sys.executable, "-P", "-c", shown]) == "set()\n"


def test_public_face_is_written_down_three_times_alike(root: Path) -> None:
    """__all__, the lazy table and the type checkers' imports must name the same things."""
    lazy = ortolan._HOME
    assert sorted([*lazy, "__version__"]) == sorted(ortolan.__all__)

    tree = ast.parse(Path(ortolan.__file__).read_text(encoding="utf-8"))
    (for_checkers,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in for_checkers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == lazy


def test_unknown_public_name_is_an_attribute_error() -> None:
    """hasattr() and `from ortolan import ...` rely on the kind of error."""
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        ortolan.lod  # noqa: B018  (the access is the test)


def test_required_package_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader learns what to type, not that a module has no attribute."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[cpu\]'") as caught:
        require("onnxruntime", "cpu", "running a model")
    assert (caught.value.package, caught.value.extra) == ("onnxruntime", "cpu")


def test_required_package_that_breaks_inside_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Telling someone to install what is installed would hide the cause."""
    (tmp_path / "half_installed.py").write_text("import absent_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        require("half_installed", "cpu", "running a model")


@pytest.fixture
def without(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """An environment for subprocesses in which the named packages cannot be imported."""

    def environment(*packages: str) -> dict[str, str]:
        (tmp_path / "sitecustomize.py").write_text(
            f"import sys\nsys.modules.update(dict.fromkeys({packages!r}))\n"
        )
        return {"PYTHONPATH": str(tmp_path)}

    return environment


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"]])
def test_base_install_shows_help(
    run_cli: RunCli, without: Callable[..., dict[str, str]], arguments: list[str]
) -> None:
    """Help must come before the extras that it explains how to install."""
    assert run_cli(*arguments, env=without(*OPTIONAL)).stdout


def test_first_command_without_onnxruntime_names_the_extra(
    run_cli: RunCli, without: Callable[..., dict[str, str]], smollm2_bundle: Path
) -> None:
    """`pip install ortolan` alone is a likely first step; the second must not be a traceback."""
    done = run_cli("generate", smollm2_bundle, "Hello", env=without("onnxruntime"), check=False)
    assert done.returncode == 1
    assert "onnxruntime" in done.stderr
    assert "pip install '.[cpu]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_export_without_its_packages_names_the_extra(
    run_cli: RunCli, without: Callable[..., dict[str, str]], smollm2_gguf: Path, tmp_path: Path
) -> None:
    """A serving machine's install has no onnx; exporting there must say what is missing."""
    missing = without("gguf", "onnx", "onnx_ir", "onnxscript")
    done = run_cli("export", smollm2_gguf, tmp_path / "bundle", env=missing, check=False)
    assert done.returncode == 1
    assert "pip install '.[export]'" in done.stderr
    assert "Traceback" not in done.stderr
