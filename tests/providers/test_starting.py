"""A provider that runs is served; one that cannot start says so, and nothing else takes over."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from provider_scenarios import CONTEXT, SCENARIOS, SLOTS
from serve_process import Served

RunCli = Callable[..., Any]

NAME = os.environ["ORTOLAN_PROVIDER"]
# Settings under which it cannot start here, and what the error has to say.
BROKEN = {
    "openvino": (["--provider-option", "device_type=GPU"], {}, "OpenVINOExecutionProvider"),
    "webgpu": ([], {"VK_ICD_FILENAMES": "/none.json"}, "adapter"),
}


@pytest.mark.skipif(NAME not in BROKEN, reason="nothing keeps the CPU from starting")
def test_provider_that_cannot_start_is_one_sentence(tiny: Path, run_cli: RunCli) -> None:
    """An answer from the CPU instead would be slow, and nobody would know."""
    options, env, says = BROKEN[NAME]
    command = ["generate", tiny, "hi", "--provider", NAME, *options]
    done = run_cli(*command, env=env, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert NAME in errors[0].lower()
    assert says in errors[0]
    assert "Traceback" not in done.stderr


def test_provider_that_another_distribution_has_is_one_sentence(
    tiny: Path, run_cli: RunCli
) -> None:
    """It says what to install."""
    done = run_cli("generate", tiny, "hi", "--provider", "cuda", check=False)
    assert done.returncode != 0
    assert "onnxruntime-gpu" in done.stderr


def test_http_answers_come_from_the_provider(
    tiny: Path, tmp_path: Path, expected: Callable[[Path], dict[str, Any]]
) -> None:
    """The whole way round once: flags, engine thread, provider, tokens, text."""
    wanted = expected(tiny)["single"][0]
    options = ["--provider", NAME, "--accuracy", "exact", "--self-test"]
    options += ["--max-slots", str(SLOTS), "--max-context", str(CONTEXT)]
    with Served(tiny, tmp_path, *options) as served:
        body = {
            "model": "tiny",
            "prompt": SCENARIOS["single"].prompts[0],
            "max_tokens": len(wanted["token_ids"]),
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
        }
        models = json.load(urllib.request.urlopen(f"http://{served.http}/v1/models", timeout=60))
        body["model"] = models["data"][0]["id"]
        request = urllib.request.Request(
            f"http://{served.http}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answer = json.load(urllib.request.urlopen(request, timeout=120))
        choice = answer["choices"][0]
        found = choice["logprobs"]["token_logprobs"]
        assert found == pytest.approx(wanted["logprobs"], abs=2e-3)
        assert served.stop() == 0
