"""The packed cache: found again, never half there, never in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from tiny_llama import write_tiny_gguf

from ortolan.errors import BundleError
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine import packed
from ortolan.runtime.engine.packed import packed_graphs
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider, find_provider

NAMES = ["decode.onnx", "prefill_ragged.onnx", "sizes.json", "weights.packed"]


@pytest.fixture(scope="module")
def provider() -> Provider:
    use_threads(None)
    return find_provider("cpu", ort)


@pytest.fixture
def bundle(smollm2_bundle: Path, tmp_path: Path) -> Bundle:
    """A bundle without a cache."""
    copy = tmp_path / "bundle"
    copy.mkdir()
    for file in smollm2_bundle.iterdir():
        if file.is_file():
            os.link(file, copy / file.name)
    return Bundle.open(copy)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def test_both_graphs_share_one_weights_file(bundle: Bundle, provider: Provider) -> None:
    """Two copies would cost their size in memory, since each is mapped."""
    paths = packed_graphs(bundle, provider, "default", None)
    assert paths is not None
    (entry,) = entries(bundle.path / ".packed")
    assert {path.parent for path in paths.values()} == {entry}
    assert sorted(file.name for file in entry.iterdir()) == NAMES


@pytest.mark.parametrize("attention", ["gqa", "onnx"])
@pytest.mark.parametrize(("kind", "tied"), [("Q4_0", True), ("Q8_0", False), ("F32", True)])
def test_other_formats_share_their_weights_too(
    tmp_path: Path, provider: Provider, attention: Any, kind: str, tied: bool
) -> None:
    """One constant more in prefill than in decode was enough to change the order of all weights."""
    types = {"*": kind, "*norm*": "F32"}
    source = write_tiny_gguf(tmp_path / "tiny.gguf", types=types, tied=tied)
    export_bundle(str(source), tmp_path / "bundle", ExportOptions(attention=attention))
    paths = packed_graphs(Bundle.open(tmp_path / "bundle"), provider, "default", None)
    assert paths is not None
    assert len({path.parent for path in paths.values()}) == 1


def test_entry_is_found_again_and_not_rebuilt(
    bundle: Bundle, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = packed_graphs(bundle, provider, "default", None)
    monkeypatch.setattr(packed, "_build", lambda *args: pytest.fail("built again"))
    assert packed_graphs(bundle, provider, "default", None) == first


def test_accuracy_and_version_have_entries_of_their_own(
    bundle: Bundle, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed weights of another runtime or setting would compute something else, or crash."""
    keys = {packed._key(bundle, provider, "default", ("decode",))}
    keys.add(packed._key(bundle, provider, "exact", ("decode",)))
    monkeypatch.setattr(ort, "__version__", "9.9")
    keys.add(packed._key(bundle, provider, "default", ("decode",)))
    monkeypatch.setattr(packed, "cpu_fingerprint", lambda: "another")
    keys.add(packed._key(bundle, provider, "default", ("decode",)))
    assert len(keys) == 4


def test_cache_dir_leaves_the_bundle_alone(
    bundle: Bundle, provider: Provider, tmp_path: Path
) -> None:
    paths = packed_graphs(bundle, provider, "default", str(tmp_path / "cache"))
    assert paths is not None
    assert all((tmp_path / "cache") in path.parents for path in paths.values())
    assert not (bundle.path / ".packed").exists()


def test_read_only_bundle_uses_the_users_cache(
    bundle: Bundle, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file in the way stops root, too, where permissions would not.
    (bundle.path / ".packed").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "xdg"))
    paths = packed_graphs(bundle, provider, "default", None)
    assert paths is not None
    assert all((tmp_path / "xdg" / "ortolan") in path.parents for path in paths.values())


def test_no_place_to_write_is_no_reason_to_fail(
    bundle: Bundle, provider: Provider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk costs speed, not the answer."""
    (tmp_path / "file").write_text("")
    assert packed_graphs(bundle, provider, "default", str(tmp_path / "file" / "cache")) is None
    assert "the packed cache cannot be written" in caplog.text


def test_failed_build_leaves_nothing(
    bundle: Bundle, provider: Provider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed, "_share_weights", full)
    assert packed_graphs(bundle, provider, "default", str(tmp_path / "cache")) is None
    (home,) = entries(tmp_path / "cache")
    assert entries(home) == []


def test_no_room_for_a_copy_is_no_reason_to_fail(
    bundle: Bundle, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are written anew for speed alone; a nearly full disk keeps them as they are."""

    def full(source: Any, target: Any, length: int) -> None:
        target.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed.shutil, "copyfileobj", full)
    assert packed_graphs(bundle, provider, "default", None) is not None
    (entry,) = entries(bundle.path / ".packed")
    assert sorted(file.name for file in entry.iterdir()) == NAMES
    assert (entry / "weights.packed").stat().st_size > 10**6


def test_damaged_weights_are_never_packed(bundle: Bundle, provider: Provider) -> None:
    """Damage that gets into the cache would be served from then on."""
    weights = bundle.path / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    with pytest.raises(BundleError, match=r"weights\.bin: damaged"):
        packed_graphs(bundle, provider, "default", None)


@pytest.mark.parametrize("name", ["weights.packed", "decode.onnx", "sizes.json"])
@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_damaged_entry_is_made_anew(
    bundle: Bundle, provider: Provider, name: str, damage: str
) -> None:
    """A cache that cannot be used must not stop what it was to speed up."""
    paths = packed_graphs(bundle, provider, "default", None)
    assert paths is not None
    file = paths["decode"].parent / name
    whole = file.stat().st_size
    if damage == "missing":
        file.unlink()
    else:
        os.truncate(file, whole // 2)
    assert packed_graphs(bundle, provider, "default", None) == paths
    assert file.stat().st_size == whole


def test_entry_that_does_not_load_is_made_anew(bundle: Bundle, provider: Provider) -> None:
    """Of the right size and damaged: found when it is opened."""
    paths = packed_graphs(bundle, provider, "default", None)
    assert paths is not None
    graph = paths["decode"]
    graph.write_bytes(bytes(graph.stat().st_size))
    with LLM(bundle, EngineConfig(max_slots=1, max_context=64)) as llm:
        assert llm.logits([1, 2, 3]).shape == (3, 49152)
    assert graph.read_bytes().strip(b"\0")


def test_old_entries_and_abandoned_builds_are_pruned(
    bundle: Bundle, provider: Provider, tmp_path: Path
) -> None:
    """Every update of ONNX Runtime adds an entry of twice the weights' size."""
    home = packed._homes(bundle, str(tmp_path))[0]
    for age in range(6):
        folder = home / f"old-{age}"
        folder.mkdir(parents=True)
        os.utime(folder, (1000 - age, 1000 - age))
    (home / "k.building-x").mkdir()
    os.utime(home / "k.building-x", (1000, 1000))
    (home / "k.building-alive").mkdir()
    paths = packed_graphs(bundle, provider, "default", str(tmp_path))
    assert paths is not None
    kept = {folder.name for folder in home.iterdir()}
    key = paths["decode"].parent.name
    assert kept == {key, "old-0", "old-1", "old-2", "k.building-alive"}


@pytest.mark.slow
def test_two_processes_may_build_at_once(bundle: Bundle) -> None:
    """Two servers started together on a fresh bundle must both come up."""
    code = (
        "import sys, ortolan; llm = ortolan.load(sys.argv[1], max_slots=1);"
        "print(llm.generate([1, 2, 3], ortolan.SamplingParams(temperature=0, max_tokens=5)))"
    )
    command = [sys.executable, "-P", "-c", code, str(bundle.path)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    answers = {run.communicate(timeout=120)[0].partition(b"ttft_s")[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(answers) == 1
    (entry,) = entries(bundle.path / ".packed")
    assert sorted(file.name for file in entry.iterdir()) == NAMES


@pytest.mark.slow
def test_killed_build_is_built_again(bundle: Bundle, provider: Provider) -> None:
    """kill -9 in the middle must not leave an entry that looks complete."""
    code = (
        "import sys, ortolan\n"
        "from ortolan.runtime.engine import packed\n"
        "def stop(*args):\n"
        "    print('building', flush=True); sys.stdin.read()\n"
        "packed._share_weights = stop\n"
        "ortolan.load(sys.argv[1], max_slots=1)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(bundle.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert run.stdin is not None
    assert run.stdout is not None
    assert run.stdout.readline() == b"building\n"
    run.kill()
    run.communicate(timeout=60)
    assert len(entries(bundle.path / ".packed")) == 1  # the abandoned folder
    assert packed_graphs(bundle, provider, "default", None) is not None
    shutil.rmtree(bundle.path / ".packed")
