"""`ortolan plan`: figures that a reader can act on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from ortolan.cli.plan import _Size, size_text
from ortolan.runtime import memory

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def bundle(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bundle that runs (the folder's `tiny_bundle` does not)."""
    from ortolan.export.exporter import ExportOptions, export_bundle

    folder = tmp_path_factory.mktemp("plan") / "my bundle"
    export_bundle(str(tiny_gguf), folder, ExportOptions())
    return folder


@pytest.fixture(autouse=True)
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that runs the tests is larger than any server without a model."""
    monkeypatch.setattr(memory, "process_bytes", lambda: 60 * 2**20)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5g", 1_500_000_000),
        (" 64 Kib", 65536),
        ("12345", 12345),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    """A plan for a thousandth of what was meant would be believed."""
    assert _Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["8 gigs", "", "-1GiB", "0", "5iB", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """With an example of one that is."""
    with pytest.raises(click.BadParameter):
        _Size().convert(text, None, None)


def test_sizes_are_shown_in_the_units_of_memory() -> None:
    """Memory is sold, limited and measured in powers of two."""
    assert size_text(300 * 2**20) == "300 MiB"
    assert size_text(2**34 + 2**33) == "24.0 GiB"


def test_parts_and_what_fits_are_shown(run: Run, bundle: Path) -> None:
    """Every part with its place, the total, and the room for KV."""
    done = run("plan", bundle, "--slots", 4, "--context", 64, "--memory", "1GiB")
    assert done.exit_code == 0, done.output
    for words in (
        "process",
        "mapped from the packed cache",
        "when 4 slots of 64 tokens",
        "1,024 MiB, as given",
        "0.5 KiB",
        "slots of 64",
        "at most 256 tokens",
    ):
        assert words in done.stdout
    assert done.stderr == ""


def test_command_that_serves_so_is_given(run: Run, bundle: Path) -> None:
    """What was planned for another machine has to be said there; the shell must read it."""
    done = run("plan", bundle, "--memory", "1GiB", "--slots", 3, "--accuracy", "exact")
    words = shlex.split(done.stdout.splitlines()[-1])
    assert words[:3] == ["ortolan", "serve", str(bundle)]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given["--max-slots"] == "3"
    assert given["--kv-tokens"] == str(3 * 64)
    assert given["--accuracy"] == "exact"
    from ortolan.cli.serve import serve

    names = {name for param in serve.params for name in param.opts}
    assert given.keys() <= names


def test_json_has_the_same_figures(run: Run, bundle: Path) -> None:
    """For whoever sizes machines by script."""
    found = json.loads(run("plan", bundle, "--memory", "1GiB", "--json").stdout)
    assert found["total"] == sum(part["bytes"] for part in found["parts"])
    assert found["memory"] == {"bytes": 2**30, "source": "given"}
    assert found["fits"] is True
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--memory", "30MiB", "--slots", 4],
            ["there are 30 MiB", "the first load packs the weights"],
        ),
        (["--memory", "1GiB", "--kv-tokens", 32], ["a request can have 32 tokens, not 64"]),
        (["--memory", "1GiB", "--kv-tokens", 64, "--slots", 2], ["not of the 128 that 2 slots"]),
    ],
)
def test_what_will_not_go_is_said(
    run: Run, bundle: Path, args: list[Any], words: list[str]
) -> None:
    """Before the machine says it, by ending the process."""
    done = run("plan", bundle, *args)
    assert done.exit_code == 0
    for sentence in words:
        assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == len(words)


def test_context_is_refused_under_the_options_name(run: Run, bundle: Path) -> None:
    """The setting's name is not what was typed."""
    done = run("plan", bundle, "--context", 65)
    assert done.exit_code == 2
    assert "--context is 65; this bundle allows 2 to 64" in done.stderr
