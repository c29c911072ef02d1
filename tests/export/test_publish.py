"""A bundle appears whole or not at all, and an old one survives whatever happens to the new."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from publishing import NAMES, assert_only_old_is_left, names, publish_to, write_bundle

from ortolan.errors import BundleError
from ortolan.export import publish
from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.export.publish import folder_beside, published_folder

AWKWARD_NAMES = ["plain", "two words", "grün-模型", "[x]*?", ".hidden", "-dash", "a.partial-b"]


@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_a_folder_appears_when_it_is_complete(tmp_path: Path, name: str) -> None:
    """Whatever the target is called; --force replaces it just so."""
    target = tmp_path / name
    for text in ("first", "second"):
        with published_folder(target, force=True, replaceable=NAMES) as folder:
            assert folder.parent == tmp_path
            assert not target.exists() or (target / "decode.onnx").read_text() == "first"
            write_bundle(folder, text)
        assert names(tmp_path) == [name]
        assert (target / "decode.onnx").read_text() == text
        assert names(target) == ["decode.onnx", "manifest.json"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, BundleError])
@pytest.mark.parametrize("existing", [False, True])
def test_an_error_leaves_nothing_new_and_all_that_was_old(
    tmp_path: Path, error: type[BaseException], existing: bool
) -> None:
    """Ctrl-C is the usual one."""
    target = tmp_path / "bundle"
    if existing:
        target.mkdir()
        write_bundle(target, "old")

    def stop_half_way() -> None:
        with published_folder(target, force=True, replaceable=NAMES) as folder:
            write_bundle(folder, "new")
            raise error("stop")

    with pytest.raises(error):
        stop_half_way()
    if existing:
        assert_only_old_is_left(target)
    else:
        assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", ["second rename", "first rename"])
def test_an_old_bundle_comes_back_when_the_exchange_fails(
    old: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, failing: str
) -> None:
    """The two renames are the only moment at which the target is absent."""
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        moves_away = self == old
        if self.name == "bundle" and not moves_away:
            return rename(self, target)  # putting it back
        if moves_away == (failing == "first rename"):
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    expected = BundleError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        publish_to(old, force=True)
    assert_only_old_is_left(old)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EFBIG, "File too large"),
        (errno.EROFS, "Read-only file system"),
    ],
)
def test_a_failing_disk_leaves_nothing_and_says_so(
    old: Path, monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path, code: int, words: str
) -> None:
    """The second half of the weights finds the disk full."""
    from ortolan.export.weights_file import WeightsFile

    write = WeightsFile._write

    def fail(self: WeightsFile, data: Any) -> None:
        if self._size > 40_000:
            raise OSError(code, os.strerror(code))
        write(self, data)

    monkeypatch.setattr(WeightsFile, "_write", fail)
    with pytest.raises(BundleError, match=words) as caught:
        export_bundle(str(tiny_gguf), old, ExportOptions(force=True))
    assert str(old) in str(caught.value)
    assert_only_old_is_left(old)


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """An export takes minutes; without --force, what came in between is someone's."""
    target = tmp_path / "bundle"

    def publish_slowly() -> None:
        with published_folder(target, force=False, replaceable=NAMES) as folder:
            write_bundle(folder, "new")
            target.mkdir()
            write_bundle(target, "old")

    with pytest.raises(BundleError, match="--force"):
        publish_slowly()
    assert_only_old_is_left(target)


def test_a_second_export_to_the_same_target_is_refused(tmp_path: Path) -> None:
    """It would otherwise take the first one's folder for a dead run's, and remove it."""
    target = tmp_path / "bundle"
    with published_folder(target, force=False, replaceable=NAMES) as folder:
        write_bundle(folder, "first")
        with pytest.raises(BundleError, match="another export"):
            publish_to(target, force=True)
        with published_folder(tmp_path / "other", force=False, replaceable=NAMES) as other:
            write_bundle(other, "other")
    assert names(tmp_path) == ["bundle", "other"]
    assert (target / "decode.onnx").read_text() == "first"


def test_a_relative_path_is_taken_from_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And missing folders above it are made."""
    monkeypatch.chdir(tmp_path)
    with published_folder(Path("new/../a/b/bundle"), force=False, replaceable=NAMES) as folder:
        write_bundle(folder, "new")
        monkeypatch.chdir("/")
    assert names(tmp_path / "a/b") == ["bundle"]


def test_a_target_inside_a_file_is_refused(tmp_path: Path) -> None:
    """A typing error in the path, which the operating system answers."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot be written"):
        publish_to(tmp_path / "file/bundle", force=False)
    with pytest.raises(BundleError, match="cannot be written"):
        publish_to(tmp_path / ("n" * 250), force=False)
    assert names(tmp_path) == ["file"]


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no umask")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], indirect=True, ids=oct)
def test_permissions_follow_the_umask(tiny_gguf: Path, tmp_path: Path, umask: int) -> None:
    """Neither readable by all where the user said no, nor private where a server must read it."""
    target = tmp_path / "bundle"
    for _ in range(2):
        export_bundle(str(tiny_gguf), target, ExportOptions(force=True))
        assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~umask
        for path in target.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, path.name


def test_a_folder_with_something_of_somebodys_is_never_replaced(tmp_path: Path) -> None:
    """A manifest.json does not make a folder a bundle."""
    target = tmp_path / "mine"
    target.mkdir()
    (target / "manifest.json").write_text("{}")
    (target / "thesis.txt").write_text("precious")
    with pytest.raises(BundleError, match=r"thesis\.txt.*no part of a bundle"):
        publish_to(target, force=True)
    assert (target / "thesis.txt").read_text() == "precious"


def test_a_folder_beside_is_left_alone_while_it_is_used(old: Path) -> None:
    """A second export during the first one's report must not take away what that reads."""
    with folder_beside(old) as folder:
        (folder / "packed").write_text("")
        assert folder.parent == old.parent
        with pytest.raises(BundleError, match="--force"):
            publish_to(old)
        publish_to(old, "newer", force=True)
        assert (folder / "packed").exists()
    assert names(old.parent) == ["bundle"]


def test_a_folder_beside_of_a_killed_run_is_removed(old: Path) -> None:
    """Its lock went with it."""
    dead = old.with_name(".bundle.ortolan-partial-report-abcd_123")
    dead.mkdir()
    (dead / ".alive").write_text("")
    with pytest.raises(BundleError, match="--force"):
        publish_to(old)
    assert_only_old_is_left(old)


def test_a_stale_folder_of_another_target_is_left_alone(tmp_path: Path) -> None:
    """`[x]` as a glob pattern would match `x`."""
    for name in (".x.ortolan-partial-1", ".[x]y.ortolan-partial-1", ".[x].ortolan-old-backup"):
        (tmp_path / name).mkdir()
    with published_folder(tmp_path / "[x]", force=False, replaceable=NAMES) as folder:
        write_bundle(folder, "new")
    assert names(tmp_path) == [
        ".[x].ortolan-old-backup",
        ".[x]y.ortolan-partial-1",
        ".x.ortolan-partial-1",
        "[x]",
    ]


def test_the_lock_is_released_with_the_folder(tmp_path: Path) -> None:
    """The same process exports again, many times, as a test suite does."""
    for _ in range(3):
        with published_folder(tmp_path / "bundle", force=True, replaceable=NAMES) as folder:
            write_bundle(folder, "new")
    assert names(tmp_path) == ["bundle"]
    with publish._locked(tmp_path / "bundle"):
        assert names(tmp_path) == [".bundle.lock", "bundle"]
