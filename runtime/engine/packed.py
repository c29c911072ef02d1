"""The packed cache: graphs optimized, weights laid out for this processor, mapped by all sessions.

An entry is a folder `KEY/` with the graphs and one weights file that they share. It is built in
`KEY.building-*` and renamed, so it appears whole; two processes that build at once each build
their own, and the second finds that the first was faster. Files of a finished entry never change:
readers have them mapped.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from ortolan.errors import EngineError
from ortolan.graphs.contract import DECODE
from ortolan.graphs.manifest import PACKED_NAME, WEIGHTS_NAME
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine.accuracy import Accuracy
from ortolan.runtime.engine.sessions import (
    decode_graph,
    open_source_graph,
    optimizing_entries,
    packs_weights,
    prefill_graph,
)
from ortolan.runtime.engine.thread_pool import use_threads
from ortolan.runtime.machine import cpu_fingerprint
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider, configured_provider

logger = logging.getLogger(__name__)

_DATA_NAME = "weights.packed"
_SIZES_NAME = "sizes.json"  # of every other file in the entry
_KEEP = 4  # entries of one bundle; another version of ONNX Runtime adds one, and so does accuracy
_ABANDONED_S = 3600.0  # a build that old was killed
_WRITE_BYTES = 16 << 20
_LAYOUT = 2  # part of the key: raise it when what an entry holds changes


def packed_graphs(
    bundle: Bundle,
    provider: Provider,
    accuracy: Accuracy,
    cache_dir: str | None,
    decode_name: str = DECODE,
) -> dict[str, Path] | None:
    """The packed form of the bundle's decode and prefill graphs, built if it is not there.

    decode_name: which of its decode graphs, see sessions.decode_graph.

    Without `cache_dir` it lives in the bundle's folder or, where that is read-only, in the user's
    cache folder. None where the provider has no such form or it cannot be written (a full disk):
    the caller then loads the bundle's own graphs, which takes longer and more memory.
    """
    if not packs_weights(provider):
        return None
    graphs = (decode_name, prefill_graph(provider))
    key = _key(bundle, provider, accuracy, graphs)
    homes = _homes(bundle, cache_dir)
    for home in homes:
        if _complete(home / key, graphs):
            with contextlib.suppress(OSError):
                _remove_abandoned(home)
            return _paths(home / key, graphs)
    reasons = []
    for home in homes:
        try:
            _build(bundle, provider, accuracy, graphs, home, key)
        except (OSError, EngineError) as exc:
            reasons.append(str(exc))
            continue
        _prune(home, keep=key)
        return _paths(home / key, graphs)
    logger.warning(
        "the packed cache cannot be written, so loading takes longer and more memory; make room, "
        "or name a folder with --cache-dir",
        extra={"reasons": "; ".join(reasons)},
    )
    return None


def is_packed(
    bundle: Bundle, provider: Provider, accuracy: Accuracy, cache_dir: str | None
) -> bool:
    """Whether `packed_graphs` would find the packed form, and build nothing."""
    graphs = (DECODE, prefill_graph(provider))
    key = _key(bundle, provider, accuracy, graphs)
    return any(_complete(home / key, graphs) for home in _homes(bundle, cache_dir))


def optimized_graphs(bundle_path: Path, config: EngineConfig) -> dict[str, Path]:
    """Optimized graphs by name, for a reader who wants to see what ONNX Runtime made of them.

    Raises EngineError where they cannot be written.
    """
    bundle = Bundle.open(bundle_path)
    use_threads(config.threads)
    provider = configured_provider(config, ort)
    name = decode_graph(bundle.manifest, config)
    packed = packed_graphs(bundle, provider, config.accuracy, config.cache_dir, name)
    if packed is None:
        raise EngineError(
            f"{bundle_path}: optimized graphs cannot be written there; give --cache-dir"
        )
    return packed


def _key(bundle: Bundle, provider: Provider, accuracy: Accuracy, graphs: tuple[str, ...]) -> str:
    files = bundle.manifest.files
    parts = {
        "layout": _LAYOUT,
        "cpu": cpu_fingerprint(),
        "onnxruntime": ort.__version__,
        "provider": provider.name,
        "accuracy": accuracy,
        "options": optimizing_entries(provider, accuracy),
        "graphs": {graph: files[f"{graph}.onnx"].sha256 for graph in graphs},
        "weights": files[WEIGHTS_NAME].sha256,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _homes(bundle: Bundle, cache_dir: str | None) -> list[Path]:
    """Folders that may hold entries of this bundle, the preferred one first."""
    name = bundle.manifest.files[WEIGHTS_NAME].sha256[:24]
    if cache_dir is not None:
        return [Path(cache_dir) / name]
    return [bundle.path / PACKED_NAME, _user_cache() / name]


def _user_cache() -> Path:
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA", "") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
    with contextlib.suppress(RuntimeError):  # no home folder
        return Path(base).expanduser() / "ortolan"
    return Path(tempfile.gettempdir()) / "ortolan"


def _paths(entry: Path, graphs: tuple[str, ...]) -> dict[str, Path]:
    """Where each graph is: beside the first, or in a folder of its own with its own weights."""
    return {
        graph: path if (path := entry / f"{graph}.onnx").exists() else entry / graph / path.name
        for graph in graphs
    }


def _complete(entry: Path, graphs: tuple[str, ...]) -> bool:
    """Whether the entry holds all that was built, at its full size, and may be read."""
    try:
        sizes = json.loads((entry / _SIZES_NAME).read_bytes())
        files = {entry / name for name in sizes}
        whole = all((entry / name).stat().st_size == size for name, size in sizes.items())
        paths = set(_paths(entry, graphs).values())
        return whole and paths <= files and all(os.access(file, os.R_OK) for file in files)
    except (OSError, ValueError, AttributeError):
        return False


def discard(packed: Mapping[str, Path]) -> None:
    """Remove the entry that these graphs are in: it was found to be damaged."""
    path = next(iter(packed.values()))
    entry = next(folder for folder in path.parents if (folder / _SIZES_NAME).exists())
    logger.warning("packed cache is damaged and made anew", extra={"folder": str(entry)})
    shutil.rmtree(entry, ignore_errors=True)


def _build(
    bundle: Bundle,
    provider: Provider,
    accuracy: Accuracy,
    graphs: tuple[str, ...],
    home: Path,
    key: str,
) -> None:
    home.mkdir(parents=True, exist_ok=True)
    building = home / f"{key}.building-{os.getpid()}-{time.time_ns()}"
    try:
        building.mkdir()
        # Damage found later would have been baked into every entry made from it.
        bundle.check_hash(WEIGHTS_NAME)
        for graph in graphs:
            (building / graph).mkdir()
            save_to = building / graph / f"{graph}.onnx"
            open_source_graph(
                bundle, graph, provider, accuracy, save_to=save_to, data_name=_DATA_NAME
            )
        # Phases that differ have weights of their own, except with the graph made for that.
        differ = bundle.manifest.phases_differ and DECODE in graphs
        _share_weights(building, graphs, logging.DEBUG if differ else logging.WARNING)
        for data in building.rglob(_DATA_NAME):
            _write_anew(data)
        _write_sizes(building)
        if (home / key).exists() and not _complete(home / key, graphs):
            shutil.rmtree(home / key, ignore_errors=True)  # damaged, and in the way
        with contextlib.suppress(OSError):  # another process was first
            building.rename(home / key)
        if not _complete(home / key, graphs):
            raise EngineError(f"{home / key}: the packed cache could not be put in place")
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _share_weights(building: Path, graphs: tuple[str, ...], level: int) -> None:
    """Put the first graph and its weights on top, and every graph whose weights are equal.

    level: of the log's line where some are not.
    """
    first = graphs[0]
    for path in sorted((building / first).iterdir()):
        path.rename(building / path.name)
    (building / first).rmdir()
    for graph in graphs[1:]:
        own = building / graph / _DATA_NAME
        if filecmp.cmp(building / _DATA_NAME, own, shallow=False):
            (building / graph / f"{graph}.onnx").rename(building / f"{graph}.onnx")
            shutil.rmtree(building / graph)
        else:
            logger.log(level, "packed weights differ between graphs", extra={"graph": graph})


def _write_anew(data: Path) -> None:
    """Copy the weights in large pieces, and put the copy in their place.

    ONNX Runtime writes tensor by tensor. What is written in large pieces lies in large pieces of
    the page cache, which saved a decode step up to a tenth and more (docs/performance.md).
    """
    copy = data.with_suffix(".copy")
    try:
        with data.open("rb") as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target, _WRITE_BYTES)
        copy.replace(data)
    except OSError as exc:  # no room for both: slower, and all there
        copy.unlink(missing_ok=True)
        logger.info("packed weights stay as written", extra={"reason": str(exc)})


def _write_sizes(building: Path) -> None:
    files = [path for path in sorted(building.rglob("*")) if path.is_file()]
    sizes = {path.relative_to(building).as_posix(): path.stat().st_size for path in files}
    (building / _SIZES_NAME).write_text(json.dumps(sizes), encoding="utf-8")


def _remove_abandoned(home: Path) -> None:
    """Remove what killed builds have left."""
    for folder in home.glob("*.building-*"):
        if time.time() - folder.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(folder, ignore_errors=True)


def _prune(home: Path, keep: str) -> None:
    """Remove abandoned builds and the oldest entries. A mapped file lives on until unmapped."""
    with contextlib.suppress(OSError):
        _remove_abandoned(home)
        entries = [
            (folder.stat().st_mtime, folder)
            for folder in home.iterdir()
            if folder.name != keep and ".building-" not in folder.name
        ]
        for _, folder in sorted(entries, reverse=True)[_KEEP - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)
