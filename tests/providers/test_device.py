"""On memory that is not the host's: what crosses over, what the self-test finds, how slots move."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from ortolan import SamplingParams
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.engine import device_opening, sessions
from ortolan.runtime.engine.device import Device
from ortolan.runtime.engine.device_kv import BatchKvCache, KvForm
from ortolan.runtime.engine.device_model import ApartDeviceModel
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import find_provider

NAME = os.environ["ORTOLAN_PROVIDER"]
pytestmark = pytest.mark.skipif(
    NAME in ("cpu", "openvino"), reason=f"what {NAME} binds is the host's memory"
)

Opened = Callable[..., Any]


def test_only_small_things_cross_over(tiny: Path, opened: Opened) -> None:
    """Logits and KV that came to the host would cost a device more than all its work."""
    llm = opened(tiny)
    device: Device = llm._running()._model.device
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0))
    before, steps = replace(device.crossings), 10
    params = SamplingParams(max_tokens=1 + steps, temperature=0, ignore_eos=True)
    llm.generate([[5, 6, 7]], params)
    # Of each token: an id, two logits and a sum; the prompt's last logits are checked.
    assert device.crossings.to_host - before.to_host == (steps + 2) * (8 + 4 + 4 + 4)
    # Read token by token, the prompt has calls of its own.
    assert device.crossings.to_device - before.to_device < (steps + 2 + 3) * 250


def test_profile_has_no_copies_of_kv_or_logits(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's own word: what it copies in a decode call are ids and lengths."""
    plain = sessions.session_options

    def profiled(entries: Any) -> Any:
        options = plain(entries)
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / "run")
        return options

    monkeypatch.setattr(sessions, "session_options", profiled)
    with LLM(Bundle.open(tiny), EngineConfig(provider=NAME, max_slots=2, max_context=32)) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        model = llm._running()._model
        events = json.loads(Path(model.sessions.decode.end_profiling()).read_text())
        config = model.config
    copied = [
        int(np.prod(shape))
        for event in events
        if event.get("args", {}).get("op_name", "").startswith("Memcpy")
        for value in event["args"]["output_type_shape"]
        for shape in value.values()
    ]
    ran = {event["args"].get("provider") for event in events if event.get("cat") == "Node"}
    assert find_provider(NAME, ort).ort_name in ran
    # A step's id and at most a few numbers more; KV has thousands, logits hundreds.
    assert copied
    assert max(copied) <= 4 < config.vocab_size


def on_swiftshader() -> None:
    if "swiftshader" not in os.environ.get("VK_ICD_FILENAMES", ""):
        pytest.skip("this is about SwiftShader, and another device is in use")


@pytest.mark.parametrize("name", ["q4_1", "window"])
def test_self_test_finds_wrong_attention_over_several_tokens(
    tiny: Path, name: str, opened: Opened
) -> None:
    """SwiftShader's is wrong, at other lengths where there is a window; all answers would be."""
    on_swiftshader()
    model = opened(tiny.with_name(name))._running()._model
    assert isinstance(model, ApartDeviceModel)
    assert model.most_prefill_tokens == 1


def test_self_test_finds_rows_that_decode_wrongly_together(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider that declares too much would mix up its requests."""
    on_swiftshader()
    from ortolan.runtime.engine import opening

    provider = find_provider(NAME, ort)
    boastful = replace(provider, capabilities=replace(provider.capabilities, ragged_decode=True))
    monkeypatch.setattr(opening, "configured_provider", lambda *_: boastful)
    with LLM(Bundle.open(tiny), EngineConfig(max_slots=2, max_context=32)) as llm:
        assert isinstance(llm._running()._model, ApartDeviceModel)
    assert "rows of different lengths decode wrongly together" in caplog.text


def test_slots_move_within_the_devices_memory(tiny: Path) -> None:
    """Where slots cannot be bound apart, graphs carry them: one slot's KV, and nobody else's."""
    model = Bundle.open(tiny).manifest.model
    device = Device(find_provider(NAME, ort))
    cache = BatchKvCache(device, KvForm(model, 8), 3)
    rng = np.random.default_rng(0)
    filled = [rng.standard_normal(cache.stage.values[0].shape(), np.float32) for _ in range(3)]
    for slot, array in enumerate(filled):
        cache.bring(slot, 0)
        cache.stage.values[0] = ort.OrtValue.ortvalue_from_numpy(array)
        cache.settle()
    before = device.crossings.to_host
    cache.copy(0, 2, 8)
    assert device.crossings.to_host == before
    found = cache.all.values[0].numpy()
    np.testing.assert_array_equal(found, np.concatenate([filled[0], filled[1], filled[0]]))
    assert cache.all.values[0].device_name() != "cpu"


def test_device_opening_is_what_engines_use() -> None:
    """The tests above patch what `opening` looks up; a move would leave them without effect."""
    from ortolan.runtime.engine import opening

    assert opening.open_device_model is device_opening.open_device_model
    assert hasattr(opening, "configured_provider")
