"""A folder that appears whole or not at all.

The work happens in `.NAME.ortolan-partial-PID` beside the target, which is renamed at the end.
`.NAME.lock` is held meanwhile: a second run to the same target is refused, and what a run finds
there of the kind was left by a killed one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ortolan.errors import BundleError

_PARTIAL = ".ortolan-partial-"
_REPORT = f"{_PARTIAL}report-"
_OLD = ".ortolan-old-"
_ALIVE = ".alive"
_LOCK_TRIES = 10


@contextlib.contextmanager
def published_folder(target: Path, *, force: bool, replaceable: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it becomes `target`, on any failure it vanishes.

    With `force` an existing target is moved away first and deleted last, if it holds nothing but
    entries of these names: whatever else lies there is somebody's. Raises BundleError if the
    target exists and may not be replaced, is being written by another run, cannot be written, or
    the disk is full.
    """
    try:
        target = Path(os.path.abspath(target))  # noqa: PTH100  resolve() would follow a symlink
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            _restore_or_remove_stale(target)
            _check_free(target, force, replaceable)
            folder = target.parent / f".{target.name}{_PARTIAL}{os.getpid()}"
            try:
                folder.mkdir()
                yield folder
                _sync(folder)
                _check_free(target, force, replaceable)  # the work took a while
                _swap(folder, target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # gone already when all went well
    except OSError as exc:
        raise _write_error(target, exc) from exc


@contextlib.contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """A folder to work in after `target` is published; it vanishes at the end.

    The next run to that target removes it if this one was killed, and leaves it alone if not. It
    is in the system's temporary folder where nothing can be written beside the target.
    """
    parent = target.absolute().parent
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}{_REPORT}",
        dir=parent if os.access(parent, os.W_OK) else None,
        ignore_cleanup_errors=True,  # Windows keeps files that are mapped
    ) as name:
        folder = Path(name)
        with FileLock(folder / _ALIVE):
            yield folder


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    path = target.parent / f".{target.name}.lock"
    lock = FileLock(path, blocking=False)
    try:
        if not _acquired(lock, path):
            raise BundleError(
                f"{target}: another export is writing it; wait for its end or choose another name"
            )
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # Windows cannot, and filelock unlinks it there
                path.unlink()
            lock.release()


def _acquired(lock: FileLock, path: Path) -> bool:
    """Take the lock of that file; False while another run holds it.

    A run unlinks the file at its end. Whoever had opened it by then gets a lock that keeps nobody
    out, since a third run makes the file anew: so it has to be one file before and after.
    """
    for _ in range(_LOCK_TRIES):
        try:
            path.touch()
            before = path.stat()
            lock.acquire()
            if os.path.samestat(before, path.stat()):
                return True
        except Timeout:
            return False
        except FileNotFoundError:  # unlinked this very moment
            pass
        except BaseException:  # a signal: who holds the file's lock takes it away
            with contextlib.suppress(Timeout, OSError):
                lock.acquire()
            raise
        lock.release(force=True)
    return False


def _check_free(target: Path, force: bool, replaceable: Collection[str]) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise BundleError(f"{target}: exists and is not a folder; choose another name")
    if target.exists() and any(target.iterdir()):
        if foreign := sorted({path.name for path in target.iterdir()} - set(replaceable)):
            raise BundleError(
                f"{target}: holds {foreign[0]!r}, which is no part of a bundle, so the folder will "
                "not be replaced; choose another name"
            )
        if not force:
            raise BundleError(f"{target}: exists already; add --force to replace it")


def _swap(folder: Path, target: Path) -> None:
    if not target.exists():
        folder.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}{_OLD}", dir=target.parent))
    try:
        target.rename(old / target.name)
        folder.rename(target)
    except BaseException:  # Ctrl-C between the two must not lose the old one from sight
        _restore(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _restore(old: Path, target: Path) -> None:
    """Put back what was moved away, unless there is a new one, and remove the rest."""
    moved = old / target.name
    if moved.exists() and not target.exists():
        moved.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _restore_or_remove_stale(target: Path) -> None:
    """Clear up after killed runs: their partial folders, and a target they had moved away.

    Only what has exactly the form that a run gives it: a neighbour may look alike.
    """
    partial = re.compile(re.escape(f".{target.name}{_PARTIAL}") + r"\d+")
    report = re.compile(re.escape(f".{target.name}{_REPORT}") + r"[a-z0-9_]{8}")
    old = re.compile(re.escape(f".{target.name}{_OLD}") + r"[a-z0-9_]{8}")
    for path in sorted(target.parent.iterdir()):
        if partial.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif report.fullmatch(path.name):
            with contextlib.suppress(OSError):  # Timeout too: a live run works in it
                FileLock(path / _ALIVE, blocking=False).acquire().lock.release()
                shutil.rmtree(path, ignore_errors=True)
        elif old.fullmatch(path.name) and {item.name for item in path.iterdir()} <= {target.name}:
            _restore(path, target)


def _sync(folder: Path) -> None:
    """Data before name: after a power cut the renamed folder must not hold empty files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_error(target: Path, exc: OSError) -> BundleError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return BundleError(
            f"{target}: no space left on the disk while writing it; nothing was kept, "
            "free some space and run again"
        )
    return BundleError(f"{target}: cannot be written ({exc.strerror or exc}); nothing was kept")
