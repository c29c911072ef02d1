"""Checkpoints by their name on the Hub, from a stand-in of it; nothing leaves the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from fake_hub import FakeHub, serving
from tiny_hf import config, random_tensors, tokenizer_json, write_folder

from ortolan.errors import CheckpointError
from ortolan.export.hub import HubId
from ortolan.export.sources import find_source, source_name
from ortolan.graphs.manifest import Manifest

NAME, BIG, GATED, BARE = "birds/ortolan", "birds/crane", "birds/dodo", "birds/wren"
TIMEOUT_S = 30.0
# In a process of its own: the library reads its environment when it is imported. Small pieces, so
# that an interrupted download of a small file has something to go on from.
FETCH = """
import sys
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 1 << 16
from ortolan.errors import CheckpointError
from ortolan.export.sources import find_source
try:
    print(find_source(sys.argv[1]))
except CheckpointError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    root = tmp_path_factory.mktemp("hub")
    texts = {"tokenizer.json": tokenizer_json(), "README.md": "unused", "pytorch_model.bin": "no"}
    main = write_folder(root / "main", config(), texts=texts, shards=2)
    write_folder(main / "onnx", config())  # a copy in a folder within
    old = write_folder(root / "old", config(num_hidden_layers=1), texts=texts)
    wide = config(vocab_size=5000)
    big = write_folder(root / "big", wide, random_tensors(wide), texts=texts)
    bare = write_folder(root / "bare", config())
    (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
    return {NAME: {"main": main, "v0.1": old}, BIG: {"main": big}, BARE: {"main": bare}}


@pytest.fixture
def hub(repositories: dict[str, dict[str, Path]]) -> Iterator[FakeHub]:
    with serving(FakeHub(repositories, gated={GATED})) as hub:
        yield hub


def environment(hub: FakeHub | None, home: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return {
        **{k: v for k, v in kept.items() if not k.lower().endswith("_proxy")},
        "HF_ENDPOINT": hub.endpoint if hub else "http://127.0.0.1:9",  # port 9: nobody listens
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **more,
    }


def command(source: str) -> list[str]:
    return [sys.executable, "-c", FETCH, source]


def fetch(source: str, env: Mapping[str, str], cwd: Path) -> str:
    """The folder that was found, or "refused: " and why."""
    done = subprocess.run(
        command(source), env=env, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_name_exports_and_is_then_in_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    """The second export needs no network, and nothing is fetched that no bundle is made from."""
    env = environment(hub, tmp_path / "home")
    first = subprocess.run(
        [sys.executable, "-m", "ortolan", "export", NAME, tmp_path / "bundle"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    assert "%|" not in first.stderr, "a progress bar where there is no terminal"
    manifest = Manifest.read(tmp_path / "bundle")
    assert manifest.source.name == f"{NAME}@{hub.commit(NAME, 'main')}"
    assert "tokenizer.json" in manifest.files
    fetched = {file for file, _ in hub.ranges}
    assert fetched == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    }
    asked = len(hub.ranges)
    offline = environment(None, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert fetch(NAME, offline, tmp_path).endswith(hub.commit(NAME, "main"))
    # Nobody listening is as good as offline.
    assert fetch(NAME, environment(None, tmp_path / "home"), tmp_path).endswith(
        hub.commit(NAME, "main")
    )
    assert len(hub.ranges) == asked


def test_a_revision_is_taken_at_its_word(hub: FakeHub, tmp_path: Path) -> None:
    """Results from main would be those of another model."""
    env = environment(hub, tmp_path / "home")
    folder = Path(fetch(f"{NAME}@v0.1", env, tmp_path))
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert source_name(folder) == f"{NAME}@{hub.commit(NAME, 'v0.1')}"
    by_commit = fetch(f"{NAME}@{hub.commit(NAME, 'v0.1')}", env, tmp_path)
    assert by_commit == str(folder)


def test_a_broken_connection_goes_on_where_it_stopped(hub: FakeHub, tmp_path: Path) -> None:
    """Of sixty gigabytes nobody wants to begin again."""
    hub.drop = "model.safetensors"
    folder = Path(fetch(BIG, environment(hub, tmp_path / "home"), tmp_path))
    first, second = (asked for file, asked in hub.ranges if file == "model.safetensors")
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").partition("-")[0]) > 1 << 18
    original = hub.revisions[BIG]["main"] / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == original.read_bytes()


def test_a_killed_download_fetches_no_whole_file_again(hub: FakeHub, tmp_path: Path) -> None:
    """Its shards are kept one by one."""
    env = environment(hub, tmp_path / "home")
    hub.stall, whole = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"
    process = subprocess.Popen(command(NAME), env=env, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        assert hub.stalled.wait(TIMEOUT_S)
        wait_for_file(tmp_path / "home", whole)
    finally:
        process.kill()
        process.wait()
        hub.released.set()
    folder = Path(fetch(NAME, env, tmp_path))
    fetched = [file for file, _ in hub.ranges]
    assert fetched.count(whole) == 1
    assert fetched.count(hub.stall) == 2
    original = hub.revisions[NAME]["main"] / hub.stall
    assert (folder / hub.stall).read_bytes() == original.read_bytes()


def wait_for_file(home: Path, name: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):  # a folder of the download's went while it was looked at
            if any(home.rglob(f"snapshots/*/{name}")):
                return
        time.sleep(0.02)
    pytest.fail(f"{name} did not arrive")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("birds/nowhere", "no such repository on the Hub; if it is private, set HF_TOKEN"),
        (f"{NAME}@v9", "no revision 'v9'"),
        (GATED, "accepted its terms"),
        (BARE, "has no safetensors"),
        (f"{NAME}:model.gguf", "has no model.gguf"),
    ],
)
def test_what_the_hub_does_not_give_is_said_in_one_sentence(
    hub: FakeHub, tmp_path: Path, source: str, why: str
) -> None:
    """Five errors of HTTP that mean five different things to do."""
    message = fetch(source, environment(hub, tmp_path / "home"), tmp_path)
    assert message.startswith("refused: ")
    assert why in message
    assert "\n" not in message


def test_an_unreachable_hub_is_said(tmp_path: Path) -> None:
    """A name that is a typing error, and a network that is down, look the same at first."""
    message = fetch(NAME, environment(None, tmp_path / "home"), tmp_path)
    assert "the Hub (http://127.0.0.1:9) cannot be reached" in message


def test_being_offline_on_purpose_is_said(tmp_path: Path) -> None:
    env = environment(None, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids" in fetch(NAME, env, tmp_path)


def test_half_a_checkpoint_in_the_cache_is_not_taken_for_a_whole(
    hub: FakeHub, tmp_path: Path
) -> None:
    """Offline, after a download that was cut."""
    env = environment(hub, tmp_path / "home")
    folder = Path(fetch(NAME, env, tmp_path))
    (folder / "model-00002-of-00002.safetensors").unlink()
    offline = environment(None, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert "refused:" in fetch(NAME, offline, tmp_path)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("org/na.me-2@refs/pr/1", HubId("org/na.me-2", "refs/pr/1")),
        ("org/name:q4.gguf", HubId("org/name", None, "q4.gguf")),
        ("org/name@main:sub/q4.gguf", HubId("org/name", "main", "sub/q4.gguf")),
        ("models/a.gguf", None),
        ("model.safetensors/x.json", None),
        ("name", None),
        ("/org/name", None),
        ("./name", None),
        ("a/b/c", None),
        ("org/name@", None),
        ("org/na me", None),
    ],
)
def test_names_are_told_from_paths(source: str, expected: HubId | None) -> None:
    assert HubId.parse(source) == expected


def test_a_mistyped_path_is_not_looked_for_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`models/lama` beside a folder `models` is a typing error, and nobody's business."""
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        find_source("models/lama")
