"""Options of providers: a wrong one is a sentence, since ONNX Runtime passes over it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortolan.errors import ProviderError, UsageError
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers import builtin_providers, load_provider
from ortolan.runtime.providers.options import options_from_text


class Session:
    """A session that is on these providers."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_providers(self) -> list[str]:
        return list(self.names)


class Options:
    """SessionOptions that remember what was set."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.enable_mem_pattern = True
        self.execution_mode = "default"

    def add_session_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value


def runtime(*names: str) -> SimpleNamespace:
    """An ONNX Runtime whose sessions are on these providers; `asked` is what they were given."""
    asked: dict[str, Any] = {}

    def open_session(model: bytes, options: Options, **given: Any) -> Session:
        asked.update(given)
        return Session(*names)

    return SimpleNamespace(
        __version__="9.9",
        ExecutionMode=SimpleNamespace(ORT_SEQUENTIAL="sequential"),
        InferenceSession=open_session,
        asked=asked,
    )


@pytest.mark.parametrize(
    ("provider", "given", "wanted"),
    [
        ("cuda", {"device_id": 1}, {"device_id": "1"}),
        ("cuda", {"gpu_mem_limit": "8GiB"}, {"gpu_mem_limit": "8589934592"}),
        ("cuda", {"gpu_mem_limit": "123"}, {"gpu_mem_limit": "123"}),
        ("cuda", {"use_tf32": True}, {"use_tf32": "1"}),
        ("cuda", {"enable_cuda_graph": "on"}, {"enable_cuda_graph": "1"}),
        ("cuda", {"cudnn_conv_algo_search": "default"}, {"cudnn_conv_algo_search": "DEFAULT"}),
        ("directml", {"device_filter": "NPU"}, {"device_filter": "npu"}),
        ("openvino", {"device_type": "AUTO:GPU,CPU"}, {"device_type": "AUTO:GPU,CPU"}),
        ("webgpu", {"powerPreference": "low-power"}, {"powerPreference": "low-power"}),
    ],
)
def test_values_become_what_onnx_runtime_reads(
    provider: str, given: dict[str, Any], wanted: dict[str, str]
) -> None:
    options = load_provider(provider).with_options(given).options
    assert {name: options[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("provider", "given", "said"),
    [
        (
            "cuda",
            {"gpu_memlimit": "1"},
            "no option 'gpu_memlimit'; did you mean gpu_mem_limit?",
        ),
        ("cuda", {"zzz": "1"}, "has no option 'zzz'; it takes device_id, gpu_mem_limit"),
        ("webgpu", {"deviceid": "1"}, "did you mean deviceId?"),
        ("cpu", {"device_id": "1"}, "provider cpu has no option 'device_id'; it takes none"),
        ("cuda", {"device_id": "-1"}, "device_id of provider cuda is '-1'; it must be a whole"),
        ("cuda", {"gpu_mem_limit": "8GB"}, "such as 8589934592 or 8GiB"),
        ("cuda", {"use_tf32": "maybe"}, "use_tf32 of provider cuda is 'maybe'; it must be 0 or 1"),
        ("cuda", {"arena_extend_strategy": "kTwice"}, "must be kNextPowerOfTwo or kSameAsReq"),
        ("openvino", {"device_type": "XPU"}, "it must be CPU, GPU, NPU, GPU.1, AUTO or a list"),
        ("cuda", {"user_compute_stream": "1"}, "has no option 'user_compute_stream'"),
    ],
)
def test_wrong_option_is_one_clear_sentence(
    provider: str, given: dict[str, Any], said: str
) -> None:
    """ONNX Runtime runs with the default instead, and nobody learns why it is slow."""
    with pytest.raises(UsageError, match=re.escape(said)):
        load_provider(provider).with_options(given)


def test_own_options_are_options_that_users_may_set() -> None:
    """A name that we set and do not know would be a typing error of ours."""
    for provider in builtin_providers():
        assert provider.options.keys() <= provider.known_options.keys(), provider.name
        again = provider.with_options(provider.options)
        assert again.options == provider.options, provider.name


def test_device_id_is_also_where_outputs_are_bound() -> None:
    """KV on one device and kernels on another would be copied in every step."""
    assert load_provider("cuda").with_options({"device_id": "3"}).device_id == 3


def test_several_options_come_from_one_text() -> None:
    text = "device_type=AUTO:GPU,CPU; cache_dir=/a b;"
    options = options_from_text(text, "VARIABLE")
    assert options == {"device_type": "AUTO:GPU,CPU", "cache_dir": "/a b"}
    with pytest.raises(UsageError, match=r"^VARIABLE is 'device_id'; it must be KEY=VALUE"):
        options_from_text("device_id", "VARIABLE")


@pytest.mark.parametrize(
    "options", [7, {"a": [1]}, {1: "a"}, {"a": None}], ids=["number", "list", "name", "none"]
)
def test_settings_of_another_form_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match=r"^provider_options"):
        EngineConfig(provider_options=options)


def test_session_without_its_provider_is_refused() -> None:
    """A device that is missing is a line in ONNX Runtime's log, and a server 50 times slower."""
    provider = load_provider("openvino")
    ort = runtime("CPUExecutionProvider")
    with pytest.raises(ProviderError, match=r"could not set up OpenVINOExecutionProvider.*GPU and"):
        provider.open_session(ort, b"", Options())  # type: ignore[arg-type]


def test_options_go_where_the_provider_reads_them() -> None:
    """WebGPU passes over provider options, and reads the session's config."""
    ort, options = runtime("WebGpuExecutionProvider"), Options()
    provider = load_provider("webgpu").with_options({"validationMode": "disabled"})
    provider.open_session(ort, b"", options)  # type: ignore[arg-type]
    assert options.entries == {"ep.webgpuexecutionprovider.validationMode": "disabled"}
    assert ort.asked == {"providers": [("WebGpuExecutionProvider", {})], "enable_fallback": 0}


def test_directml_gets_what_its_documentation_demands() -> None:
    """With memory patterns or parallel execution its sessions do not open."""
    ort, options = runtime("DmlExecutionProvider"), Options()
    load_provider("directml").open_session(ort, b"", options)  # type: ignore[arg-type]
    assert options.enable_mem_pattern is False
    assert options.execution_mode == "sequential"


def test_libraries_of_cuda_are_loaded_before_a_session_asks_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """pip puts them where the system's loader does not look."""
    ort = runtime("CUDAExecutionProvider")

    def preload() -> None:
        ort.asked.update(preloaded=True)
        print("Failed to load libx.so")  # noqa: T201  (as onnxruntime does)

    ort.preload_dlls = preload
    load_provider("cuda").open_session(ort, b"", Options())  # type: ignore[arg-type]
    assert ort.asked["preloaded"]
    ((name, given),) = ort.asked["providers"]
    assert name == "CUDAExecutionProvider"
    assert capsys.readouterr().out == ""  # or it would stand in an answer
    assert given["use_tf32"] == "0"
    assert given["arena_extend_strategy"] == "kSameAsRequested"


def test_only_decode_is_captured_and_by_its_number_of_rows() -> None:
    """A recording that is replayed with other shapes or buffers gives another call's answer."""
    plain = load_provider("cuda")
    assert plain.run_config(4) == plain.run_config(None) == {}
    provider = plain.with_options({"enable_cuda_graph": "1"})
    assert provider.captures
    assert provider.run_config(4) == {"gpu_graph_id": "4"}
    assert provider.run_config(None) == {"gpu_graph_id": "-1"}
    ort = runtime("CUDAExecutionProvider")
    provider.open_session(ort, b"", Options())  # type: ignore[arg-type]
    assert "enable_cuda_graph" not in ort.asked["providers"][0][1]
    provider.open_session(ort, b"", Options(), captured=True)  # type: ignore[arg-type]
    assert ort.asked["providers"][0][1]["enable_cuda_graph"] == "1"


def test_page_has_every_provider_and_option(root: Path) -> None:
    """Who reads the page must not miss one, nor type one that is not there."""
    page = (root / "docs/providers.md").read_text(encoding="utf-8")
    table = page[page.index("## Options") : page.index("## A plug-in library")]
    for provider in builtin_providers():
        (row,) = re.findall(rf"^\| `{provider.name}` \| (.*) \|$", table, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == set(provider.known_options), provider.name
        assert f"| `{provider.name}` | {provider.ort_name} | `{provider.distribution}`" in page
