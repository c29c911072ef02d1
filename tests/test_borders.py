"""Which room may import which, and who may print: the borders that ARCHITECTURE.md draws.

Each border is checked twice. Reading the source finds imports wherever they stand, also inside
functions. Importing a room's modules in a fresh process and looking at `sys.modules` finds what
comes in by detours.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

Modules = Mapping[str, Path]
WalkModules = Callable[[Mapping[str, Path]], dict[str, Path]]

# Only building graphs and reading checkpoints need these; a serving machine has none of them.
BUILDING = frozenset({"gguf", "onnx", "onnx_ir", "onnxscript", "safetensors"})
# gRPC, what an HTTP server is made with, and what is told to those who watch it.
WIRE = frozenset(
    {"aiohttp", "fastapi", "flask", "grpc", "hypercorn", "starlette", "tornado", "uvicorn"}
    | {"opentelemetry", "prometheus_client"}
)
TERMINAL = frozenset({"click", "rich"})
# Nothing needs these. The processes below run as if they were not installed.
NOBODYS = frozenset({"torch", "transformers"})

OPEN_TO_ALL = ("ortolan", "ortolan.errors", "ortolan.optional")


@dataclass(frozen=True)
class Room:
    """Modules under one rule.

    `holds` and `may_import` are dotted names; one that ends in ".*" stands for the package and
    all below it. A module belongs to the first room in ROOMS that holds it.
    `never`: packages that no module here names. `never_loaded`: nor any detour brings in.
    """

    holds: tuple[str, ...]
    may_import: tuple[str, ...]
    never: frozenset[str]
    never_loaded: frozenset[str] = frozenset()


ROOMS = {
    # `import ortolan` is paid by every command, `--help` included: it loads nothing else.
    "front door": Room(
        holds=("ortolan", "ortolan.errors", "ortolan.optional"),
        may_import=OPEN_TO_ALL,
        never=BUILDING | WIRE | TERMINAL | NOBODYS,
        never_loaded=BUILDING | WIRE | TERMINAL | {"numpy", "onnxruntime"},
    ),
    # What the runtime may know about graphs: how to read a bundle, not how to build one.
    "contract": Room(
        holds=("ortolan.graphs", "ortolan.graphs.contract", "ortolan.graphs.manifest"),
        may_import=(
            *OPEN_TO_ALL,
            "ortolan.graphs",
            "ortolan.graphs.contract",
            "ortolan.graphs.manifest",
        ),
        never=BUILDING | WIRE | TERMINAL | NOBODYS,
        never_loaded=BUILDING | WIRE | TERMINAL,
    ),
    "graphs": Room(
        holds=("ortolan.graphs.*",),
        may_import=(*OPEN_TO_ALL, "ortolan.graphs.*"),
        never=WIRE | TERMINAL | NOBODYS,
    ),
    "export": Room(
        holds=("ortolan.export.*",),
        may_import=(*OPEN_TO_ALL, "ortolan.graphs.*", "ortolan.export.*"),
        never=WIRE | TERMINAL | NOBODYS,
    ),
    "serve": Room(
        holds=("ortolan.runtime.serve.*",),
        may_import=(
            *OPEN_TO_ALL,
            "ortolan.graphs",
            "ortolan.graphs.contract",
            "ortolan.graphs.manifest",
            "ortolan.runtime.*",
            "ortolan.proto.*",
        ),
        never=BUILDING | TERMINAL | NOBODYS,
        never_loaded=BUILDING,
    ),
    "runtime": Room(
        holds=("ortolan.runtime.*",),
        may_import=(
            *OPEN_TO_ALL,
            "ortolan.graphs",
            "ortolan.graphs.contract",
            "ortolan.graphs.manifest",
            "ortolan.runtime.*",
        ),
        never=BUILDING | WIRE | TERMINAL | NOBODYS,
        never_loaded=BUILDING | WIRE,
    ),
    "proto": Room(
        holds=("ortolan.proto.*",),
        may_import=(*OPEN_TO_ALL, "ortolan.proto.*"),
        never=BUILDING | TERMINAL | NOBODYS,
    ),
    "client": Room(
        holds=("ortolan.client.*",),
        may_import=(*OPEN_TO_ALL, "ortolan.client.*", "ortolan.proto.*"),
        never=BUILDING | TERMINAL | NOBODYS,
    ),
    # What `ortolan bench` measures with. Its peers are other engines, imported in child processes.
    "bench": Room(
        holds=("ortolan.bench.*",),
        may_import=(
            *OPEN_TO_ALL,
            "ortolan.bench.*",
            "ortolan.client.*",
            "ortolan.graphs",
            "ortolan.graphs.contract",
            "ortolan.graphs.manifest",
            "ortolan.runtime.*",
        ),
        never=WIRE | TERMINAL | NOBODYS,
    ),
    # The CLI joins the rooms, so it may import any of them. It reaches proto by way of client and
    # serve, inside functions: `ortolan --help` needs the base install alone.
    "cli": Room(
        holds=("ortolan.__main__", "ortolan.cli.*"),
        may_import=(
            *OPEN_TO_ALL,
            "ortolan.__main__",
            "ortolan.bench.*",
            "ortolan.cli.*",
            "ortolan.client.*",
            "ortolan.export.*",
            "ortolan.graphs.*",
            "ortolan.runtime.*",
        ),
        never=WIRE | NOBODYS,
    ),
}


# ── Reading the source ─────────────────────────────────────────────────────────────────────────


def source_violations(modules: Modules) -> list[str]:
    """Imports and prints that break a border, one line each, found without running anything."""
    found = []
    for module, file in modules.items():
        room = ROOMS[room_of(module)]
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
        for line, name in imported_names(tree, module, modules):
            package = name.partition(".")[0]
            # The front door names the public face's homes, for type checkers only.
            free = package != "ortolan" or module == "ortolan" or covers(room.may_import, name)
            if package in room.never or not free:
                found.append(f"{module}:{line} imports {name}")
        if room is not ROOMS["cli"]:
            found += [f"{module}:{line} prints" for line in prints(tree)]
    return found


def imported_names(tree: ast.AST, module: str, modules: Modules) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, in any form that spells the name out.

    `from a import b` gives `a.b` where that is a module of ours, otherwise `a`.
    """
    package = module if modules[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                below = f"{base}.{alias.name}"
                yield node.lineno, below if below in modules else base
        elif isinstance(node, ast.Call):
            match node.func, node.args:
                case (
                    (
                        ast.Name(id="import_module" | "require" | "__import__")
                        | ast.Attribute(attr="import_module" | "require")
                    ),
                    [ast.Constant(value=str(name)), *_],
                ):
                    yield node.lineno, name


def prints(tree: ast.AST) -> Iterator[int]:
    """Lines that call print or take hold of the process's standard output or error."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="print" | "pprint")):
                yield node.lineno
            case ast.Attribute(
                value=ast.Name(id="sys"),
                attr="stdout" | "stderr" | "__stdout__" | "__stderr__",
            ):
                yield node.lineno


def room_of(module: str) -> str:
    """The room that holds the module; a module that no room holds has no rule, which is a fault."""
    for name, room in ROOMS.items():
        if covers(room.holds, module):
            return name
    raise AssertionError(f"{module} lies in no room; give it one in tests/test_borders.py")


def covers(names: tuple[str, ...], module: str) -> bool:
    """Whether one of the names is the module, or stands for it by ".*"."""
    return any(
        module == name.removesuffix(".*")
        or (name.endswith(".*") and module.startswith(name.removesuffix("*")))
        for name in names
    )


# ── Importing in a fresh process ───────────────────────────────────────────────────────────────

# argv: modules to import, in order, and packages to behave as absent. Prints, per module,
# what its import added to sys.modules. `ortolan` itself comes first: everything shares it.
LOADER = """
import importlib, json, sys
modules, absent = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(absent))
loaded, before = {}, set(sys.modules)
for module in modules:
    importlib.import_module(module)
    loaded[module] = sorted(set(sys.modules) - before)
    before = set(sys.modules)
print(json.dumps(loaded))
"""


def loading_violations(modules: Modules, path: Path | None = None) -> list[str]:
    """What importing each room's modules brings in against its rule.

    One process per room: what an earlier module of the room brought in was allowed there, or
    has already been reported. `path` is put first on the import path.
    """
    found = []
    for name, room in ROOMS.items():
        inmates = [module for module in modules if room_of(module) == name]
        for module, loaded in load(inmates, path).items():
            for other in loaded:
                package = other.partition(".")[0]
                ours = package == "ortolan"
                if package in room.never_loaded or (ours and not covers(room.may_import, other)):
                    found.append(f"importing {module} brings in {other}")
    return found


def load(modules: list[str], path: Path | None) -> dict[str, list[str]]:
    """Module -> what its import added to sys.modules, all in one fresh process."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADER, json.dumps([modules, sorted(NOBODYS)])],
        env={**os.environ, **({"PYTHONPATH": str(path)} if path else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return loaded


# ── The borders ────────────────────────────────────────────────────────────────────────────────


def test_source_respects_the_borders(source_modules: Modules) -> None:
    """A border that one lazy import crosses is a border that the next change ignores."""
    assert source_violations(source_modules) == []


def test_loading_respects_the_borders(source_modules: Modules) -> None:
    """A serving machine has no onnx: a detour to it would only show there, as a crash."""
    assert loading_violations(source_modules) == []


# ── The checks themselves: each finds a planted violation ──────────────────────────────────────

EMPTY_TREE = (
    "ortolan/__init__.py",
    "ortolan/errors.py",
    "ortolan/optional.py",
    "ortolan/cli/__init__.py",
    "ortolan/graphs/__init__.py",
    "ortolan/graphs/contract.py",
    "ortolan/graphs/decoder.py",
    "ortolan/export/__init__.py",
    "ortolan/export/writer.py",
    "ortolan/runtime/__init__.py",
    "ortolan/runtime/llm.py",
    "ortolan/runtime/serve/__init__.py",
    "ortolan/proto/__init__.py",
    "onnx/__init__.py",
    "grpc/__init__.py",
)


@pytest.fixture
def planted(tmp_path: Path, walk_modules: WalkModules) -> Callable[..., Modules]:
    """Writes a source tree of empty modules, with the given ones filled, and returns it."""

    def plant(**files: str) -> Modules:
        for name in EMPTY_TREE:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        for module, text in files.items():
            (tmp_path / "ortolan" / f"{module}.py").write_text(text, encoding="utf-8")
        return walk_modules({"ortolan": tmp_path / "ortolan"})

    return plant


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("graphs/decoder", "import ortolan.export.writer"),
        ("graphs/decoder", "from ortolan.runtime import llm"),
        ("graphs/contract", "from ortolan.graphs import decoder"),
        ("graphs/contract", "from . import decoder"),
        ("graphs/contract", "import onnx"),
        ("export/writer", "from ortolan.runtime.llm import load"),
        ("export/writer", "from ..runtime.llm import load"),
        ("export/writer", "def f():\n    import ortolan.runtime"),
        ("runtime/llm", "import ortolan.export"),
        ("runtime/llm", "from ortolan.graphs.decoder import Decoder"),
        ("runtime/llm", "def f():\n    import onnx.helper"),
        ("runtime/llm", "from importlib import import_module\nimport_module('safetensors')"),
        ("runtime/llm", "from ortolan.optional import require\nrequire('gguf', 'export', 'x')"),
        ("runtime/llm", "from ortolan import proto"),
        ("runtime/llm", "import grpc"),
        ("runtime/llm", "def f():\n    import fastapi"),
        ("runtime/llm", "import ortolan.cli"),
        ("runtime/llm", "from rich.console import Console"),
        ("runtime/llm", "print('hello')"),
        ("export/writer", "import sys\ndef f():\n    sys.stderr.write('hello')"),
        ("runtime/serve/__init__", "import onnxscript"),
        ("export/writer", "import torch"),
        ("cli/__init__", "import grpc"),
        ("optional", "import ortolan.graphs"),
    ],
)
def test_source_check_finds_a_planted_violation(
    planted: Callable[..., Modules], module: str, text: str
) -> None:
    """A check that cannot fail guards nothing."""
    found = source_violations(planted(**{module: text}))
    assert len(found) == 1, found
    assert found[0].startswith("ortolan." + module.removesuffix("/__init__").replace("/", "."))


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("graphs/decoder", "import ortolan.export.writer", "brings in ortolan.export"),
        ("graphs/contract", "__import__('on' + 'nx')", "brings in onnx"),
        ("runtime/llm", "__import__('on' + 'nx')", "importing ortolan.runtime.llm brings in onnx"),
        ("runtime/__init__", "__import__('gr' + 'pc')", "brings in grpc"),
        ("errors", "import ortolan.graphs.contract", "importing ortolan"),
    ],
)
def test_loading_check_finds_a_planted_violation(
    planted: Callable[..., Modules], tmp_path: Path, module: str, text: str, expected: str
) -> None:
    """Detours that reading the source cannot see must still be found."""
    found = loading_violations(planted(**{module: text}), path=tmp_path)
    assert any(expected in line for line in found), found


def test_checks_accept_what_is_allowed(planted: Callable[..., Modules], tmp_path: Path) -> None:
    """False alarms would teach people to widen the rules."""
    tree = planted(
        **{
            "graphs/decoder": "import onnx\nfrom ortolan.graphs import contract",
            "export/writer": "import onnx, ortolan.graphs.decoder\nimport ortolan.errors",
            "runtime/llm": "import ortolan.graphs.contract\nfrom ortolan import optional",
            "runtime/serve/__init__": "import grpc, ortolan.proto, ortolan.runtime.llm",
            "cli/__init__": "import ortolan.export, ortolan.runtime.llm\nprint('hello')",
        }
    )
    assert source_violations(tree) == []
    assert loading_violations(tree, path=tmp_path) == []


def test_module_without_a_room_is_refused(planted: Callable[..., Modules]) -> None:
    """A new package must get a rule before it gets a first import."""
    with pytest.raises(AssertionError, match=r"ortolan\.extras lies in no room"):
        source_violations(planted(extras=""))
