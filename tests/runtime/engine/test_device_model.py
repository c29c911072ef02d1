"""An engine whose memory is not the host's gives the same answers as one whose memory is.

The CPU stands in for a device: its kernels are the same, so answers must be equal bit for bit.
tests/providers runs the same on a device that has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from ortolan import SamplingParams
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine import opening, self_test
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_model import ApartDeviceModel, BatchDeviceModel
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider, find_provider

SLOTS = 4
PROMPTS = [[5, 6, 7, 8, 9], [20, 21, 22], [30], list(range(40, 57)), [60, 61], [70] * 20]
FORMS = ["batch", "apart", "batch, copied", "apart, copied"]


class NotOnHost(Provider):
    """The CPU, as a provider with memory of its own."""

    @property
    def on_host(self) -> bool:
        return False


def as_device(form: str) -> NotOnHost:
    cpu = find_provider("cpu", ort)
    capabilities = replace(
        cpu.capabilities,
        ragged_prefill=False,
        slices=False,
        packs_weights=False,
        ragged_decode=form.startswith("batch"),
        in_place_kv="copied" not in form,
    )
    return NotOnHost(**{**vars(cpu), "capabilities": capabilities})


@pytest.fixture(params=FORMS)
def on_device(
    request: pytest.FixtureRequest, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    monkeypatch.setattr(opening, "find_provider", lambda *args: as_device(request.param))
    config = EngineConfig(max_slots=SLOTS, max_context=48, prefill_chunk=16, prefix_cache_mb=0)
    with LLM(Bundle.open(tiny_bundle), config) as llm:
        yield llm


@pytest.fixture(scope="module")
def on_host(tiny_bundle: Path) -> Iterator[LLM]:
    config = EngineConfig(max_slots=SLOTS, max_context=48, prefill_chunk=16, prefix_cache_mb=0)
    with LLM(Bundle.open(tiny_bundle), config) as llm:
        yield llm


def answers(llm: LLM, params: SamplingParams) -> list[tuple[object, ...]]:
    results = llm.generate(PROMPTS, params)
    return [(result.token_ids, result.finish_reason, result.logprobs) for result in results]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=12, seed=3, n=3, ignore_eos=True, repetition_penalty=1.2),
    ],
)
def test_answers_are_the_hosts(on_device: LLM, on_host: LLM, params: SamplingParams) -> None:
    """More prompts than slots, of all lengths, forked: every move of a slot is in there."""
    assert answers(on_device, params) == answers(on_host, params)


def test_scores_of_a_prompt_are_the_hosts(on_device: LLM, on_host: LLM) -> None:
    """They take logits of every position, which no graph chooses from."""
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    for prompt in PROMPTS:
        found, wanted = (llm.generate([prompt], params)[0] for llm in (on_device, on_host))
        assert found.prompt_logprobs == wanted.prompt_logprobs


def test_kinds_of_cache_are_what_they_are_called(on_device: LLM, request: object) -> None:
    """Otherwise the tests above would run one of them twice."""
    model = on_device._running()._model
    form = request.node.callspec.params["on_device"]  # type: ignore[attr-defined]
    assert isinstance(model, BatchDeviceModel if form.startswith("batch") else ApartDeviceModel)


def test_only_small_things_cross_over(on_device: LLM) -> None:
    """Logits and KV that came to the host would cost a device more than all its work."""
    engine = on_device._running()
    device: Device = engine._model.device
    vocab = engine._model.config.vocab_size
    on_device.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0))
    before = replace(device.crossings)
    steps = 10
    params = SamplingParams(max_tokens=1 + steps, temperature=0, ignore_eos=True)
    on_device.generate([[5, 6, 7]], params)
    to_host = device.crossings.to_host - before.to_host
    to_device = device.crossings.to_device - before.to_device
    # Of each token: an id, two logits and a sum come back; the prompt's last logits are checked.
    assert to_host == (steps + 2) * (8 + 4 + 4 + 4)
    # What goes in: ids, lengths and a row's settings, and slots' flags once the prompt is read.
    assert to_device < (steps + 2) * 250 + SLOTS * 2 * engine._model.config.num_layers
    assert vocab * 4 > to_device / steps


def model_of(llm: LLM) -> BatchDeviceModel:
    model = llm._running()._model
    assert isinstance(model, BatchDeviceModel)
    return model


@pytest.mark.parametrize("on_device", ["batch"], indirect=True)
def test_wrong_attention_over_several_tokens_is_found(
    on_device: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts are then read token by token, which is slow and right."""
    model = model_of(on_device)
    self_test.limit_prefill(model)
    assert model.most_prefill_tokens is None
    call = model._call

    def wrong(bound: object, values: object, ids: list[int], *rest: object) -> object:
        return call(bound, values, [ids[0]] * len(ids), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "_call", wrong)
    self_test.limit_prefill(model)
    assert model.most_prefill_tokens == 1
    assert "read token by token" in caplog.text


@pytest.mark.parametrize("on_device", ["batch"], indirect=True)
def test_wrong_attention_over_rows_is_found(
    on_device: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with WebGPU: every row is taken to be as long as the longest."""
    model = model_of(on_device)
    assert self_test.decodes_ragged_rows(model)
    decode = model.decode
    monkeypatch.setattr(
        model, "decode", lambda first, ids, lengths: decode(first, ids, [max(lengths)] * 2)
    )
    assert not self_test.decodes_ragged_rows(model)


def test_logits_are_indexed_like_arrays(on_device: LLM) -> None:
    """The engine does not ask where they lie."""
    logits = on_device._running()._model.prefill(0, [[5, 6, 7]], [0], [[0, 1, 2]])
    array = logits.numpy()
    assert array.shape == (1, 3, on_device._running()._model.config.vocab_size)
    np.testing.assert_array_equal(logits[0].numpy(), array[0])
    np.testing.assert_array_equal(logits[0, -1:].numpy(), array[0, -1:])
    np.testing.assert_array_equal(logits[0][[2, 0]].numpy(), array[0][[2, 0]])
    assert len(logits[0]) == 3
