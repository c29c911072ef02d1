"""An engine whose memory is not the host's gives the same answers as one whose memory is.

The CPU stands in for a device: its kernels are the same, so answers must be equal bit for bit.
tests/providers runs the same on a device that has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from ortolan import SamplingParams
from ortolan.errors import ProviderError
from ortolan.graphs.manifest import Dtypes
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine import device_logits, opening, self_test
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_model import ApartDeviceModel, BatchDeviceModel
from ortolan.runtime.engine.device_opening import check_fit
from ortolan.runtime.engine.device_slices import SlicedDeviceModel
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider, find_provider

SLOTS = 4
KINDS = {"batch": BatchDeviceModel, "apart": ApartDeviceModel, "slices": SlicedDeviceModel}
PROMPTS = [[5, 6, 7, 8, 9], [20, 21, 22], [30], list(range(40, 57)), [60, 61], [70] * 20]
FORMS = ["batch", "apart", "slices", "slices, recorded", "batch, copied", "apart, copied"]


class NotOnHost(Provider):
    """The CPU, as a provider with memory of its own."""

    @property
    def on_host(self) -> bool:
        return False

    @property
    def captures(self) -> bool:
        return "recorded" in self.hint

    def run_config(self, rows: int | None) -> dict[str, str]:
        return {}  # which the CPU would refuse


def as_device(form: str) -> NotOnHost:
    cpu = find_provider("cpu", ort)
    capabilities = replace(
        cpu.capabilities,
        ragged_prefill=False,
        slices="slices" in form,
        packs_weights=False,
        ragged_decode="apart" not in form,
        in_place_kv="copied" not in form,
    )
    return NotOnHost(**{**vars(cpu), "capabilities": capabilities, "hint": form})


@pytest.fixture(params=FORMS)
def on_device(
    request: pytest.FixtureRequest, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    monkeypatch.setattr(opening, "configured_provider", lambda *args: as_device(request.param))
    config = EngineConfig(max_slots=SLOTS, max_context=48, prefill_chunk=16, prefix_cache_mb=0)
    config = replace(config, kv_copies="copied" in request.param)
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
    assert isinstance(model, KINDS[form.partition(",")[0]])


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
    read_into = model.read_into

    def wrong(values: Any, bound: Any, inputs: dict[str, np.ndarray]) -> object:
        inputs["input_ids"][:] = inputs["input_ids"][0, 0]
        return read_into(values, bound, inputs)

    monkeypatch.setattr(model, "read_into", wrong)
    self_test.limit_prefill(model)
    assert model.most_prefill_tokens == 1
    assert "read token by token" in caplog.text


@pytest.mark.parametrize("on_device", ["batch"], indirect=True)
def test_wrong_attention_at_one_length_is_found(
    on_device: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with WebGPU and a sliding window of five: five tokens were wrong, twelve were right."""
    model = model_of(on_device)
    read_into = model.read_into

    def wrong(values: Any, bound: Any, inputs: dict[str, np.ndarray]) -> object:
        if inputs["input_ids"].shape[1] == 5:
            inputs["input_ids"][:] = inputs["input_ids"][0, 0]
        return read_into(values, bound, inputs)

    monkeypatch.setattr(model, "read_into", wrong)
    self_test.limit_prefill(model)
    assert model.most_prefill_tokens == 1


def test_logits_of_tokens_read_one_by_one_are_each_ones_own(on_device: LLM) -> None:
    """With onnxruntime 1.27, outputs of earlier calls turn into the last one's, scores with them.

    1.32 does not do so: on WebGPU, `make test-providers` would show it.
    """
    model = on_device._running()._model
    ids = [5, 6, 7, 8]
    whole = model.prefill(0, [ids], [0], [[0, 1, 3]]).numpy()
    model.most_prefill_tokens = 1
    try:
        found = device_logits.on_host(model.prefill(0, [ids], [0], [[0, 1, 3]]))
    finally:
        model.most_prefill_tokens = None
    # A token alone is multiplied by another kernel, with activations rounded to int8.
    np.testing.assert_allclose(found, whole, atol=0.05 * np.abs(whole).max())


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


def test_provider_that_copies_the_cache_is_refused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step would cost as much as reading the whole cache, and nobody would know why."""
    monkeypatch.setattr(opening, "configured_provider", lambda *args: as_device("batch, copied"))
    with pytest.raises(ProviderError, match=r"cannot write the KV cache in place.*--kv-copies"):
        LLM(Bundle.open(tiny_bundle), EngineConfig(max_context=48))


def test_flavor_that_a_provider_does_not_run_is_refused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime would name an operator, deep in a graph."""
    provider = as_device("batch")
    only_onnx = replace(provider.capabilities, flavors=("onnx",))
    unfit = replace(provider, capabilities=only_onnx)
    monkeypatch.setattr(opening, "configured_provider", lambda *args: unfit)
    with pytest.raises(ProviderError, match=r"attention of the gqa flavor; export with --att"):
        LLM(Bundle.open(tiny_bundle), EngineConfig(max_context=48))


def test_int8_cache_that_a_provider_cannot_read_is_refused(tiny_bundle: Path) -> None:
    """ONNX Runtime says so at the first call, after minutes of loading."""
    manifest = replace(
        Bundle.open(tiny_bundle).manifest, dtypes=Dtypes(activations="float32", kv="int8")
    )
    provider = as_device("batch")
    without = replace(provider, capabilities=replace(provider.capabilities, int8_kv=False))
    check_fit(provider, manifest, EngineConfig())
    with pytest.raises(ProviderError, match=r"cannot read the int8 KV cache.*without --kv int8"):
        check_fit(without, manifest, EngineConfig())


@pytest.mark.parametrize("context", [2, 5, 13])
def test_short_contexts_are_checked_too(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """The check's own prompt must fit into a slot."""
    monkeypatch.setattr(opening, "configured_provider", lambda *args: as_device("batch"))
    with LLM(Bundle.open(tiny_bundle), EngineConfig(max_slots=2, max_context=context)) as llm:
        params = SamplingParams(max_tokens=1, temperature=0)
        assert len(llm.generate([[5, 6]], params)[0].token_ids) == 1


@pytest.mark.parametrize("on_device", ["batch", "slices", "slices, recorded"], indirect=True)
def test_copied_slot_is_kept_by_calls_that_leave_it_out(on_device: LLM) -> None:
    """After a call that failed, rows decode one by one: the others run along, and write."""
    model = on_device._running()._model
    prompt = list(range(5, 14))
    model.prefill(0, [prompt], [0], [[8]])
    wanted = model.decode(0, [30], [len(prompt)]).numpy()
    model.prefill(0, [prompt], [0], [[8]])
    model.prefill(3, [prompt[:3]], [0], [[2]])  # what was in the slot before, and how much
    model.cache.copy(0, 3, len(prompt))
    model.decode(2, [31], [0])
    np.testing.assert_array_equal(model.decode(3, [30], [len(prompt)]).numpy(), wanted)


@pytest.mark.parametrize("on_device", ["slices, recorded"], indirect=True)
def test_recorded_batches_are_few_and_within_the_slots(on_device: LLM) -> None:
    """A batch beyond the slots would write into memory that is somebody else's."""
    model = on_device._running()._model
    assert isinstance(model, SlicedDeviceModel)
    model.cache.slots = 3
    calls = [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1)]
    assert [model._batch(*call) for call in calls] == [(0, 1), (0, 2), (0, 3), (0, 2), (0, 3)]
