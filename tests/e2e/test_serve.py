"""`ortolan serve` and `ortolan client`, as people type them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from serve_process import Served, wait_until

from ortolan.graphs.manifest import PACKED_NAME
from ortolan.runtime.machine import cpu_shares

RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def served(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    options = ("--http-port", "off", "--model-name", "small")
    with Served(tiny_bundle, folder, *options) as server:
        yield server


def test_server_says_where_it_listens_and_where_settings_come_from(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who runs a server finds a wrong setting in its first lines."""
    monkeypatch.setenv("ORTOLAN_SERVE_MAX_SLOTS", "3")
    config = tmp_path / "serve.toml"
    config.write_text('http_port = "off"\nmax_waiting = 9\n')
    ports = ("--grpc-port", "0")
    with Served(tiny_bundle, tmp_path, "--config", config, ports=ports) as server:
        assert server.stop() == 0
    said = server.said
    assert f"\ngRPC: {server.addresses['grpc']}\n" in said
    assert "\ntiny is ready\n" in said
    rows = {tuple(line.split()) for line in said.splitlines()}
    assert ("max_slots", "3", "ORTOLAN_SERVE_MAX_SLOTS") in rows
    assert ("max_waiting", "9", str(config)) in rows
    assert ("grpc_port", "0", "--grpc-port") in rows
    assert ("host", "127.0.0.1", "default") in rows
    assert server.addresses["model"] == "tiny"
    assert server.addresses["http"] is None


def test_client_generates_as_the_library_does(
    served: Served, run_cli: RunCli, tiny_bundle: Path
) -> None:
    """The same command with `client` in it must say the same."""
    options = ("--max-tokens", "9", "--json")
    remote = run_cli(
        "client", "generate", "the fox", "--address", served.addresses["grpc"], *options
    )
    local = run_cli("generate", tiny_bundle, "the fox", *options)
    one, other = json.loads(remote.stdout), json.loads(local.stdout)
    assert one["token_ids"] == other["token_ids"]
    assert one["text"] == other["text"]
    assert one["usage"]["completion_tokens"] == 9


def test_client_chats_once_and_line_by_line(served: Served, run_cli: RunCli) -> None:
    address = ("--address", served.addresses["grpc"], "--max-tokens", "5")
    once = run_cli("client", "chat", "the fox", "--system", "be brief", *address)
    talk = run_cli("client", "chat", "--system", "be brief", *address, input="the fox\n/exit\n")
    assert once.stdout
    assert talk.stdout == once.stdout
    assert "5 tokens generated" in once.stderr


def test_client_shows_models_and_stats(served: Served, run_cli: RunCli) -> None:
    address = ("--address", served.addresses["grpc"])
    (model,) = json.loads(run_cli("client", "models", *address, "--json").stdout)
    assert model["name"] == "small"
    assert "small" in run_cli("client", "models", *address).stdout
    stats = json.loads(run_cli("client", "stats", *address, "--json").stdout)
    assert stats["running"] == 0
    assert "kv_budget_tokens" in run_cli("client", "stats", *address).stdout


def test_client_names_the_option_that_the_server_refuses(served: Served, run_cli: RunCli) -> None:
    address = ("--address", served.addresses["grpc"])
    done = run_cli("client", "generate", "x", "--top-k", "301", *address, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: --top-k is 301; the model's vocabulary has 300 tokens, and 0 switches top_k off\n"
    )


def test_client_without_a_server_says_so(run_cli: RunCli) -> None:
    done = run_cli("client", "stats", "--address", "127.0.0.1:9", check=False)
    assert done.returncode == 1
    assert "127.0.0.1:9 cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_address_without_a_port_is_refused(run_cli: RunCli) -> None:
    """gRPC would ask port 443, and whoever typed it would look for a fault of the server."""
    done = run_cli("client", "stats", "--address", "localhost", check=False)
    assert done.returncode == 2
    assert "'localhost' has no port; give HOST:PORT, as 127.0.0.1:50051" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be kept there")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one core to share")
@pytest.mark.parametrize("threads", [2, 4])
def test_replicas_answer_as_one_engine_and_each_stays_on_its_cores(
    threads: int, run_cli: RunCli, tiny_bundle: Path, tmp_path: Path
) -> None:
    """Whoever adds replicas wants more answers, and the same ones."""
    prompts = [f"the {word} is" for word in ("fox", "hen", "dog", "sun", "sea")]
    options = ("--max-tokens", "9", "--json")
    expected = [run_cli("generate", tiny_bundle, prompt, *options).stdout for prompt in prompts]
    serving = ("--replicas", "2", "--threads", str(threads), "--http-port", "off")
    with Served(tiny_bundle, tmp_path, *serving) as server:
        address = ("--address", server.addresses["grpc"])
        found = [
            run_cli("client", "generate", prompt, *address, *options).stdout for prompt in prompts
        ]
        kept = [
            os.sched_getaffinity(int(task.name))
            for task in Path(f"/proc/{server.process.pid}/task").iterdir()
        ]
        stats = json.loads(run_cli("client", "stats", *address, "--json").stdout)
        assert server.stop() == 0
    for one, other in zip(expected, found, strict=True):
        assert json.loads(one)["token_ids"] == json.loads(other)["token_ids"]
    assert stats["completion_tokens"] >= 9 * len(prompts)
    for share in cpu_shares(2) or ():
        assert share in kept


def test_port_in_use_is_told_by_name(served: Served, run_cli: RunCli, tiny_bundle: Path) -> None:
    port = served.addresses["grpc"].rpartition(":")[2]
    done = run_cli("serve", tiny_bundle, "--grpc-port", port, "--http-port", "off", check=False)
    assert done.returncode == 2
    assert f"grpc_port {port}" in done.stderr


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        (["--grpc-port", "x"], {}, "--grpc-port is 'x'"),
        (["--grace", "-1"], {}, "--grace is -1"),
        (["--replicas", "0"], {}, "--replicas is 0; it must be from 1 to 1024"),
        (["--replicas", "3", "--threads", "2"], {}, "replicas is 3, and there are 2 threads"),
        ([], {"ORTOLAN_SERVE_PORT": "1"}, "ORTOLAN_SERVE_PORT is no setting"),
        (["--grcp-port", "1"], {}, "--grpc-port"),
    ],
)
def test_wrong_setting_is_exit_status_2(
    run_cli: RunCli, tiny_bundle: Path, options: list[str], env: dict[str, str], said: str
) -> None:
    """Orchestrators tell a wrong command from a failed one by it."""
    done = run_cli("serve", tiny_bundle, *options, env=env, check=False)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("command", "extra"), [(["client", "stats"], "client"), (["serve"], "serve")]
)
def test_missing_package_is_named_with_its_extra(
    run_cli: RunCli, tiny_bundle: Path, tmp_path: Path, command: list[str], extra: str
) -> None:
    """The base install has neither; the reader learns what to type."""
    hide = 'import sys\nsys.modules["grpc"] = None\n'
    (tmp_path / "sitecustomize.py").write_text(hide)
    arguments = [*command, *([str(tiny_bundle)] if extra == "serve" else [])]
    done = run_cli(*arguments, env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 1
    assert f"pip install '.[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_setting_has_an_option() -> None:
    """A field of EngineConfig that only a file can set would be found by nobody."""
    from ortolan.cli.serve import _HELP
    from ortolan.runtime.serve.config import DEFAULTS

    assert list(_HELP) == list(DEFAULTS)


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_server_that_is_still_loading_ends_by_a_signal(tmp_path: Path, tiny_bundle: Path) -> None:
    """An orchestrator that changes its mind must not wait for a model to load."""
    with Served(tiny_bundle, tmp_path, "--http-port", "off", wait=False) as server:
        wait_until(lambda: "\ngRPC: " in server.said, "it listens")
        assert server.stop() == 0


@pytest.mark.parametrize("file", ["weights.bin", "decode.onnx"])
def test_damaged_bundle_never_becomes_ready(tmp_path: Path, tiny_bundle: Path, file: str) -> None:
    """It fails while it loads, when ports already listen: one sentence, and not the word."""
    copy = tmp_path / "tiny"
    shutil.copytree(tiny_bundle, copy, ignore=shutil.ignore_patterns(PACKED_NAME))
    data = bytearray((copy / file).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (copy / file).write_bytes(data)
    with Served(copy, tmp_path, wait=False) as server:
        assert server.process.wait(60) == 1
    assert f"error: {copy / file}: " in server.said.splitlines()[-1]
    assert "is ready" not in server.said
    assert "Traceback" not in server.said
    assert not server.port_file.exists()


def test_port_file_without_a_folder_is_found_before_loading(
    tiny_bundle: Path, run_cli: RunCli, tmp_path: Path
) -> None:
    """A server that nobody can find must not load its model first and fail then."""
    missing = tmp_path / "missing" / "ports.json"
    done = run_cli(
        "serve",
        tiny_bundle,
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--port-file",
        missing,
        check=False,
    )
    assert done.returncode == 2
    assert "its folder does not exist; make it first" in done.stderr
    assert "is ready" not in done.stdout
