"""What is measured is opened as the engine opens it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

import onnxruntime as ort

from ortolan.bench import measure
from ortolan.bench.cases import Case
from ortolan.runtime.engine.device_model import ApartDeviceModel, BatchDeviceModel
from ortolan.runtime.engine.device_slices import SlicedDeviceModel
from ortolan.runtime.engine.model import Model
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import Provider, find_provider


class NotOnHost(Provider):
    """The CPU, as a provider with memory of its own."""

    @property
    def on_host(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (None, Model),
        ({"slices": True}, SlicedDeviceModel),
        ({"slices": False}, BatchDeviceModel),
        ({"ragged_decode": False}, ApartDeviceModel),
    ],
)
def test_model_is_measured_in_the_form_that_serves(
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, bool] | None,
    kind: type,
) -> None:
    """A figure of another form than the engine's would promise what no request gets."""
    provider = find_provider("cpu", ort)
    if changes is not None:
        capabilities = replace(provider.capabilities, ragged_prefill=False, packs_weights=False)
        capabilities = replace(capabilities, **changes)
        provider = NotOnHost(**{**vars(provider), "capabilities": capabilities})
    monkeypatch.setattr(measure, "configured_provider", lambda *args: provider)
    cases = [Case("prefill", 1, 1, 0, 20), Case("decode", 1, 3, 8, 4)]
    config = EngineConfig(prefill_chunk=16, cache_dir=str(tmp_path))
    bench = measure.Bench(tiny_bundle, config, cases)
    assert type(bench.opened.model) is kind
    prefill, decode = map(bench.run, cases)
    assert len(prefill.steps_s) == 2  # chunks of at most 16
    assert len(decode.steps_s) == 4
