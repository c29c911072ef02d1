"""Exports that are killed, interrupted, limited by the system, or run beside each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from publishing import assert_only_old_is_left, names, publish_to, write_bundle

from ortolan.errors import BundleError
from ortolan.export import publish
from ortolan.export.exporter import ExportOptions, export_bundle

FILL_AND_WAIT = """
import sys
from pathlib import Path
from ortolan.export import publish

def say_and_wait(text):
    print(text, flush=True)
    sys.stdin.readline()

where, target = sys.argv[1], Path(sys.argv[2])
if where == "between renames":
    rename = Path.rename
    def watched(self, to):
        if self == target:
            result = rename(self, to)
            say_and_wait("ready")
            return result
        return rename(self, to)
    Path.rename = watched
if where == "sync":
    publish._sync = lambda folder: say_and_wait("ready")
names = ("manifest.json", "decode.onnx")
with publish.published_folder(target, force=True, replaceable=names) as folder:
    (folder / "manifest.json").write_text("new")
    (folder / "decode.onnx").write_text("new")
    if where == "writing":
        say_and_wait("ready")
"""

EXPORT_AND_WAIT = """
import sys
from pathlib import Path
from ortolan.export.exporter import ExportOptions, export_bundle

def progress(name, done, total):
    if done == total // 2:
        print("ready", flush=True)
        sys.stdin.readline()

export_bundle(sys.argv[1], Path(sys.argv[2]), ExportOptions(force=True), progress)
"""


def start(script: str, *args: str) -> subprocess.Popen[str]:
    """A process that has printed "ready" and waits for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tempfile.gettempdir(),  # at the root, ./ortolan would hide an installed wheel
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen[str], kill: bool) -> int:
    if kill:
        process.kill()
    process.communicate("" if kill else "\n", timeout=60)
    return process.returncode


@pytest.mark.parametrize("where", ["writing", "sync", "between renames"])
def test_after_kill_9_the_next_run_clears_up_and_the_old_bundle_is_there(
    old: Path, where: str
) -> None:
    """Nothing can run in the killed process; the next one finds and mends what it left."""
    finish(start(FILL_AND_WAIT, where, str(old)), kill=True)
    assert any(".ortolan-partial-" in name for name in names(old.parent))
    with pytest.raises(BundleError, match="--force"):
        publish_to(old, force=False)
    assert_only_old_is_left(old)


def test_after_kill_9_of_an_export_the_next_one_succeeds(tiny_gguf: Path, tmp_path: Path) -> None:
    """A machine that ran out of memory half way: the same command again is all it takes."""
    target = tmp_path / "my [bundle]"
    finish(start(EXPORT_AND_WAIT, str(tiny_gguf), str(target)), kill=True)
    (partial,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert partial.name.startswith(".my [bundle].ortolan-partial-")
    assert (partial / "weights.bin").exists()
    export_bundle(str(tiny_gguf), target, ExportOptions())
    assert names(tmp_path) == ["my [bundle]"]


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT for one child")
def test_ctrl_c_during_an_export_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    """The signal itself, not an exception raised by hand."""
    process = start(EXPORT_AND_WAIT, str(tiny_gguf), str(tmp_path / "bundle"))
    process.send_signal(signal.SIGINT)
    _, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["writing", "sync"])
def test_a_live_run_of_another_process_is_not_disturbed(tmp_path: Path, where: str) -> None:
    """Its folder looks just like a dead run's."""
    target = tmp_path / "bundle"
    process = start(FILL_AND_WAIT, where, str(target))
    with pytest.raises(BundleError, match="another export"):
        publish_to(target, force=True)
    assert finish(process, kill=False) == 0
    assert names(tmp_path) == ["bundle"]
    assert (target / "decode.onnx").read_text() == "new"


LIMITED = """
import os, resource, sys
from pathlib import Path
from ortolan.errors import BundleError
from ortolan.export.exporter import ExportOptions, export_bundle

def act():
    export_bundle(sys.argv[2], Path(sys.argv[3]), ExportOptions(force=True))

if sys.argv[1] == "small files":
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
elif os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
try:
    act()
except BundleError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits and user ids")
@pytest.mark.parametrize(
    ("limit", "words"), [("small files", "File too large"), ("read-only", "Permission denied")]
)
def test_limits_of_the_system_give_one_sentence(tiny_gguf: Path, limit: str, words: str) -> None:
    """A file size limit stands for a full disk: the system refuses in the middle of a file."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are private to their user
        folder = Path(name)
        target = folder / "parent" / "bundle"
        target.mkdir(parents=True)
        write_bundle(target, "old")
        source = folder / "tiny.gguf"
        source.write_bytes(tiny_gguf.read_bytes())
        folder.chmod(0o755)
        if limit == "read-only":
            target.parent.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, limit, source, target],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
            check=True,
        )
        assert words in done.stdout
        assert done.stdout.count("\n") == 1
        assert str(target) in done.stdout
        target.parent.chmod(0o755)
        assert_only_old_is_left(target)


def test_a_lock_on_a_name_that_another_run_made_anew_keeps_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three runs at once, two would write, and remove each other's folder as a dead run's."""
    path = tmp_path / ".bundle.lock"
    third: list[FileLock] = []

    class Slow(FileLock):
        """Gets the lock of a file that the first run unlinks, before the third makes another."""

        def acquire(self, *args: Any, **kwargs: Any) -> Any:
            taken = super().acquire(*args, **kwargs)
            if not third:
                path.unlink()
                third.append(FileLock(path, blocking=False))
                third[0].acquire()
            return taken

    monkeypatch.setattr(publish, "FileLock", Slow)
    with pytest.raises(BundleError, match="another export is writing it"):
        publish_to(tmp_path / "bundle")
    assert path.exists()
    third[0].release()
    publish_to(tmp_path / "bundle")
    assert names(tmp_path) == ["bundle"]


def test_a_lock_on_a_name_that_is_gone_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before has just ended, so nothing is in the way."""
    unlinked: list[Path] = []

    class Slow(FileLock):
        def acquire(self, *args: Any, **kwargs: Any) -> Any:
            taken = super().acquire(*args, **kwargs)
            if not unlinked:
                unlinked.append(tmp_path / ".bundle.lock")
                unlinked[0].unlink()
            return taken

    monkeypatch.setattr(publish, "FileLock", Slow)
    publish_to(tmp_path / "bundle")
    assert names(tmp_path) == ["bundle"]
