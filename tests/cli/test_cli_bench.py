"""`ortolan bench`: reports that add up, refusals in one sentence, nothing left behind."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Run = Callable[..., Result]
RunCli = Callable[..., subprocess.CompletedProcess[str]]

QUICK = ("--quick", "--batch", "1,2", "--prompt", "16", "--context", "8", "--steps", "3")

# Answers as llama-bench and llama-batched-bench do, from their own arguments.
FAKE_LLAMA = """
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "-npl" in given:
    print(json.dumps({"pl": int(given["-npl"]), "tg": int(given["-ntg"]), "t_tg": 6.0}))
elif "-p" in given:
    prompt, generate = int(given["-p"]), int(given["-n"])
    print(json.dumps({"n_prompt": prompt, "n_gen": generate, "samples_ns": [3e9]}))
else:
    print("version: 123 (fake)")
"""


@pytest.fixture(scope="module")
def bundle(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real bundle of a tiny model; its packed graphs are kept inside."""
    pytest.importorskip("onnxruntime")
    from ortolan.export.exporter import ExportOptions, export_bundle

    folder = tmp_path_factory.mktemp("bench") / "tiny"
    export_bundle(str(tiny_gguf), folder, ExportOptions())
    return folder


def fake_llama(folder: Path, script: str = FAKE_LLAMA) -> Path:
    """A folder with programs of llama.cpp's names that run this Python."""
    folder.mkdir()
    (folder / "fake.py").write_text(script)
    for name in ("llama-bench", "llama-batched-bench"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/fake.py" "$@"\n')
        program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def found(bundle: Path, run_cli: RunCli, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The JSON of one run with two numbers of threads, a peer and profiles."""
    folder = fake_llama(tmp_path_factory.mktemp("llama") / "bin")
    (folder / "model.gguf").touch()
    done = run_cli(
        *("bench", bundle, *QUICK, "--threads", "1,2", "--repeat", "2", "--output", "json"),
        *("--profile", "--against", f"llama.cpp:{folder}/model.gguf", "--llama-bin", folder),
    )
    return json.loads(done.stdout)


def rows(found: Any, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in found["results"] if all(row[k] == v for k, v in wanted.items())]


def test_every_case_has_its_row(found: Any) -> None:
    """A case that vanishes from the report looks like one that was never asked for."""
    for threads in (1, 2):
        ours = rows(found, system="ortolan", threads=threads)
        names = [(row["phase"], row["batch"], row["context"], row["tokens"]) for row in ours]
        assert names == [
            ("prefill", 1, 0, 16),
            ("decode", 1, 8, 3),
            ("decode", 2, 8, 3),
            ("generate", 1, 16, 3),  # greedy
            ("generate", 1, 16, 3),  # full sampling
        ]


def test_numbers_of_a_row_agree(found: Any) -> None:
    """Tokens per second, times and percentiles are one measurement seen from three sides."""
    for row in rows(found, system="ortolan", phase="decode"):
        times, token = row["time_ms"], row["token_ms"]
        assert len(times["samples"]) == 2
        assert times["low"] <= times["median"] <= times["high"]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 3e3 / times["median"])
        assert 0 < token["p50"] <= token["p90"] <= token["p99"]
        bound = row["bound"]
        slower = max(bound["memory_ms"], bound["compute_ms"])
        assert bound["fraction"] == pytest.approx(slower / token["p50"])
        assert bound["limit"] == ("memory" if slower == bound["memory_ms"] else "compute")


def test_request_tells_first_token_and_overhead_apart(found: Any) -> None:
    """What the engine adds to a step is what users of small models pay most for."""
    for row in rows(found, phase="generate"):
        assert row["ttft_ms"]["median"] > 0
        assert 0 < row["outside_session"] < 1


def test_ratio_is_their_time_over_ours(found: Any) -> None:
    """Above one, Ortolan is faster: the wrong way round would be believed, too."""
    for row in rows(found, system="llama.cpp"):
        seconds = 6.0 if row["batch"] > 1 else 3.0
        assert row["time_ms"]["median"] == pytest.approx(seconds * 1e3)
        (ours,) = rows(found, **{**key(row), "system": "ortolan"})
        pairs = [seconds * 1e3 / sample for sample in ours["time_ms"]["samples"]]
        assert row["ratio"]["median"] == pytest.approx(sum(pairs) / 2)
    assert {row["phase"] for row in rows(found, system="llama.cpp")} == {"prefill", "decode"}


def key(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("phase", "threads", "batch", "context", "tokens")}


def test_report_says_what_was_measured_on_what(found: Any, bundle: Path) -> None:
    """A figure without its machine, versions and bundle cannot be compared with another."""
    assert found["schema_version"].startswith("1.")
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]
    assert found["machine"]["busy_elsewhere_cores"] >= 0
    assert {"python", "ortolan", "onnxruntime", "numpy"} <= found["versions"].keys()
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert found["bundle"]["weights_sha256"] == manifest["files"]["weights.bin"]["sha256"]
    assert found["bundle"]["precision"]["mlp: int4 block 32 + offsets"] > 0
    assert [peaks["threads"] for peaks in found["peaks"]] == [1, 2]
    for peaks in found["peaks"]:
        assert peaks["read_bytes_per_s"] > 0
        assert peaks["flops_per_s"].keys() == {"float32", "int4 block 32", "int8 block 32"}
    assert found["peers"]["llama.cpp"]["version"] == "version: 123 (fake)"


def test_profile_adds_up(found: Any) -> None:
    """Two views of the same operators: both have to make the whole."""
    phases = [(profile["phase"], profile["batch"]) for profile in found["profiles"]]
    assert phases == [("prefill", 1), ("decode", 1), ("decode", 2)]
    for profile in found["profiles"]:
        for view in ("by_kind", "by_operator"):
            lines = profile[view]
            assert sum(line["share"] for line in lines) == pytest.approx(1)
            assert all(line["limit"] in ("memory", "compute", None) for line in lines)
        kinds = {line["name"] for line in profile["by_kind"]}
        wanted = {"embedding", "qkv", "attention", "out", "gate_up", "down", "norm", "head"}
        assert wanted | {"offsets"} <= kinds
        assert ("sampling" in kinds) == (profile["phase"] == "decode")


def test_table_shows_each_part(bundle: Path, run_cli: RunCli) -> None:
    """Read by people: each phase, its bound, one request."""
    done = run_cli("bench", bundle, *QUICK, "--repeat", "1")
    for part in ("prefill", "decode", "reached", "full sampling", "outside the session", "GB/s"):
        assert part in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_csv_has_one_line_for_each_case(bundle: Path, run_cli: RunCli) -> None:
    """For spreadsheets: plain numbers under fixed names."""
    done = run_cli("bench", bundle, *QUICK, "--repeat", "1", "--output", "csv")
    lines = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [line["phase"] for line in lines] == ["prefill", *["decode"] * 2, *["generate"] * 2]
    for line in lines:
        assert float(line["tokens_per_s"]) > 0
        assert float(line["bound_fraction"]) > 0
        assert (line["ttft_ms"] != "") == (line["phase"] == "generate")


def test_what_does_not_fit_is_left_out_and_named(bundle: Path, run_cli: RunCli) -> None:
    """The defaults must work on a model with a short context, and say what they skipped."""
    options = ("--quick", "--batch", "1", "--steps", "2", "--repeat", "1")
    done = run_cli(
        "bench", bundle, *options, "--prompt", "16,512", "--context", "8,63", "--output", "csv"
    )
    assert "left out, too long for this bundle: --prompt 512, --context 63" in done.stderr
    assert len(done.stdout.splitlines()) == 1 + 1 + 1 + 2


def test_figures_are_drawn(bundle: Path, run_cli: RunCli, tmp_path: Path) -> None:
    """Without a suffix there are both kinds."""
    pytest.importorskip("matplotlib")
    run_cli("bench", bundle, *QUICK, "--repeat", "1", "--plot", tmp_path / "speed")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "speed.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", "1,x"), "'1,x' is no list of whole numbers"),
        (("--batch", "0"), "not from 1 to"),
        (("--batch", "2,2"), "--batch must be different whole numbers"),
        (("--threads", "5000"), "not from 1 to 1024"),
        (("--prompt", "65"), "--prompt 65 do not fit into 64 positions"),
        (("--context", "63", "--prompt", "8"), "--context 63 and 32 steps do not fit"),
        (("--against", "vllm:x"), "none of llama.cpp:FILE.gguf"),
        (("--against", "llama.cpp:nothing.gguf"), "there is no nothing.gguf"),
        (("--against", "genai:a", "--against", "genai:b"), "names one engine twice"),
    ],
)
def test_wrong_option_is_one_sentence(
    run: Run, bundle: Path, options: tuple[str, ...], message: str
) -> None:
    """Found before minutes of measuring, and said once."""
    done = run("bench", bundle, "--prompt", "16", "--context", "8", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [("speed.pdf", "must end in .png or .svg"), ("nowhere/speed.png", "there is no folder")],
)
def test_figures_that_cannot_be_written_are_refused_first(
    run: Run, bundle: Path, target: str, message: str
) -> None:
    """Minutes of measuring must not end in an error about a file name."""
    pytest.importorskip("matplotlib")
    done = run("bench", bundle, "--plot", target)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("package", "extra", "options"),
    [("onnx", "bench", ()), ("onnxruntime", "cpu", ()), ("matplotlib", "bench", ("--plot", "a"))],
)
def test_missing_package_names_its_extra(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    bundle: Path,
    package: str,
    extra: str,
    options: tuple[str, ...],
) -> None:
    """The base install has none of them."""
    monkeypatch.setitem(sys.modules, package, None)
    done = run("bench", bundle, *options)
    assert done.exit_code == 1
    assert f"pip install '.[{extra}]'" in done.stderr


def test_folder_that_is_no_bundle_is_refused(run: Run, tmp_path: Path) -> None:
    """Before any process is started."""
    done = run("bench", tmp_path)
    assert done.exit_code == 1
    assert "not a bundle" in done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
def test_interrupt_leaves_no_process(bundle: Path, tmp_path: Path) -> None:
    """Ctrl-C while a peer runs: neither it nor a measuring process may go on."""
    running = tmp_path / "running"
    script = (
        f"import os, time\nopen({str(running)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    version = "import sys\nif '--version' in sys.argv:\n    print('fake'); sys.exit()\n"
    folder = fake_llama(tmp_path / "bin", version + script)
    (folder / "model.gguf").touch()
    command = [sys.executable, "-m", "ortolan", "bench", bundle, *QUICK]
    command += ["--against", f"llama.cpp:{folder}/model.gguf", "--llama-bin", folder]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        wait_for(lambda: running.exists() and running.read_text() != "")
        below = children(process.pid)
        assert len(below) == 2  # the measuring process, and the peer
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    wait_for(lambda: not any(alive(pid) for pid in below))


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], bool], most_s: float = 120) -> None:
    until = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


@pytest.mark.slow
def test_real_model_is_measured_whole(smollm2_bundle: Path, run_cli: RunCli) -> None:
    """All sweeps at once, each tiny, on the model that people try first."""
    done = run_cli(
        *("bench", smollm2_bundle, "--quick", "--threads", "1,2", "--batch", "1,4"),
        *("--prompt", "32,64", "--context", "16,64", "--steps", "4", "--repeat", "2"),
        *("--profile", "--output", "json"),
    )
    found = json.loads(done.stdout)
    assert len(found["results"]) == 2 * (2 + 4 + 3)
    (step,) = rows(found, phase="decode", threads=2, batch=1, context=16)
    # 98 MB of weights in the source, with scales in 16 bits that are 32 here; KV of 17 tokens.
    assert 110e6 < step["bound"]["bytes"] < 120e6
    assert step["bound"]["limit"] == "memory"
    for row in found["results"]:
        assert row["bound"]["fraction"] > 0
