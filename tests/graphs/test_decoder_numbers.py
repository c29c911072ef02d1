"""What the decoder graphs compute, against a Llama that is not ours, from the same GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from reference_llama import ReferenceLlama
from tiny_llama import Shape, write_tiny_gguf

from ortolan.export.exporter import ExportOptions, WeightsChoice, export_bundle
from ortolan.graphs.manifest import Manifest, ModelConfig
from ortolan.runtime.engine.sessions import session_options
from ortolan.runtime.engine.thread_pool import use_threads

IDS = [2, 299, 7, 7, 120, 45, 0, 200, 31, 288, 5, 64, 17, 290, 99, 3, 150, 12, 77]
CAPACITY = 32
TOLERANCE = 1e-4  # of the largest logit

MIXED: dict[str, Any] = {
    # v in 8 bits: q, k and v cannot be stored as one. Down projections as some converters do.
    "v-apart": {"*": "Q4_1", "*attn_v*": "Q8_0", "*ffn_down*": "F16", "token_embd*": "Q8_0"},
    "all-apart": {
        "*": "Q4_0",
        "*attn_q*": "Q4_1",
        "*attn_k*": "BF16",
        "*attn_v*": "F32",
        "*ffn_gate*": "Q4_1",
        "*ffn_up*": "Q8_0",
        "blk.1.attn_output*": "F16",
        "*norm*": "F16",
    },
    "layers-differ": {"blk.0.*": "Q4_1", "blk.1.*": "Q8_0", "token_embd*": "BF16"},
}
UNUSUAL = {
    "wide-heads": Shape(hidden=64, heads=2, kv_heads=1, head_dim=64),
    "narrow-heads": Shape(hidden=128, heads=4, kv_heads=4, head_dim=16, inner=64),
    "one-layer": Shape(layers=1, theta=500000.0, epsilon=1e-2),
}


def open_session(path: Path, accuracy_level: int) -> ort.InferenceSession:
    use_threads(None)
    entries = {"session.qdq_matmulnbits_accuracy_level": str(accuracy_level)}
    return ort.InferenceSession(path, session_options(entries), providers=["CPUExecutionProvider"])


class Bundle:
    """A bundle's graphs in float32 arithmetic (accuracy level 1), with explicit KV arrays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: ModelConfig = Manifest.read(folder).model
        self._sessions: dict[str, ort.InferenceSession] = {}

    def empty_kv(self, batch: int = 1) -> dict[str, np.ndarray]:
        c = self.config
        # Not zeros: what lies beyond a row's length must never be read.
        filler = np.full((batch, c.num_kv_heads, CAPACITY, c.head_dim), 1e3, np.float32)
        return {
            f"past_key_values.{i}.{part}": filler.copy()
            for i in range(c.num_layers)
            for part in ("key", "value")
        }

    def run(self, graph: str, kv: dict[str, np.ndarray], **feeds: Any) -> np.ndarray:
        """The logits; `kv` is replaced in place by what the graph hands back as present."""
        session = self._session(graph)
        outputs = session.run(None, {**kv, **feeds})
        names = [
            output.name.replace("present", "past_key_values") for output in session.get_outputs()
        ]
        kv.update(zip(names[1:], outputs[1:], strict=True))
        return np.asarray(outputs[0])

    def prefill(
        self,
        ids: list[int],
        kv: dict[str, np.ndarray],
        past: int = 0,
        index: list[int] | None = None,
    ) -> np.ndarray:
        """One chunk of one row -> logits [n, vocab]."""
        wanted = list(range(len(ids))) if index is None else index
        return self.run(
            "prefill",
            kv,
            input_ids=np.array([ids], np.int64),
            seqlens_k=np.array([past + len(ids) - 1], np.int32),
            total_sequence_length=np.array(past + len(ids), np.int32),
            logits_index=np.array([wanted], np.int32),
        )[0]

    def decode(self, ids: list[int], kv: dict[str, np.ndarray], past: list[int]) -> np.ndarray:
        """One token for each row -> logits [batch, vocab]."""
        return self.run(
            "decode",
            kv,
            input_ids=np.array(ids, np.int64)[:, None],
            seqlens_k=np.array(past, np.int32),
            total_sequence_length=np.array(max(past) + 1, np.int32),
        )[:, 0]

    def _session(self, graph: str) -> ort.InferenceSession:
        if graph not in self._sessions:
            # A tied head carries its accuracy level in the graph, as an attribute.
            path = self.folder / f"{graph}.exact.onnx"
            path.write_bytes(
                (self.folder / f"{graph}.onnx")
                .read_bytes()
                .replace(b"accuracy_level\x18\x04", b"accuracy_level\x18\x01")
            )
            self._sessions[graph] = open_session(path, accuracy_level=1)
        return self._sessions[graph]


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Bundle]:
    def run(source: Path, weights: WeightsChoice = "source") -> Bundle:
        folder = tmp_path / f"{source.stem}-{weights}"
        export_bundle(str(source), folder, ExportOptions(weights=weights))
        return Bundle(folder)

    return run


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, f"logits are off by {error:.2e} of the largest"


def check_against_reference(bundle: Bundle, source: Path) -> None:
    """Prefill whole and in chunks, decode from scratch and continued, ragged rows."""
    expected = ReferenceLlama(source).logits(IDS)
    cut = 11

    whole = bundle.empty_kv()
    assert_close(bundle.prefill(IDS, whole), expected)

    kv = bundle.empty_kv()
    assert_close(bundle.prefill(IDS[:4], kv, index=[3]), expected[3:4])
    assert_close(bundle.prefill(IDS[4:cut], kv, past=4, index=[6, 0]), expected[[10, 4]])
    for position in range(cut, len(IDS)):
        logits = bundle.decode([IDS[position]], kv, [position])
        assert_close(logits, expected[position : position + 1])
    for name, array in kv.items():
        np.testing.assert_allclose(
            array[:, :, : len(IDS)], whole[name][:, :, : len(IDS)], rtol=0, atol=1e-3
        )

    check_ragged(bundle, expected)


def check_ragged(bundle: Bundle, expected: np.ndarray) -> None:
    """Two rows with pasts of 5 and 0 read chunks of 3 and 6, then decode a token each."""
    one = bundle.empty_kv()
    bundle.prefill(IDS[:5], one)
    kv = bundle.empty_kv(batch=2)
    for name, array in kv.items():
        array[0] = one[name][0]
    logits = bundle.run(
        "prefill_ragged",
        kv,
        input_ids=np.array([[*IDS[5:8], 0, 0, 0], IDS[:6]], np.int64),
        seqlens_k=np.array([7, 5], np.int32),
        total_sequence_length=np.array(8, np.int32),
        query_seqlens=np.array([3, 6], np.int32),
        logits_index=np.array([[2, 0], [5, 3]], np.int32),
    )
    assert_close(logits, expected[[[7, 5], [5, 3]]])
    assert_close(bundle.decode([IDS[8], IDS[6]], kv, [8, 6]), expected[[8, 6]])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_every_format_computes_the_reference_logits(
    tmp_path: Path, export: Callable[..., Bundle], kind: str, tied: bool
) -> None:
    """Codes, scales, offsets, row order and rotary all have to be right for this."""
    source = write_tiny_gguf(tmp_path / "model.gguf", types=kind, tied=tied)
    check_against_reference(export(source), source)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_formats_compute_the_reference_logits(
    tmp_path: Path, export: Callable[..., Bundle], name: str, tied: bool
) -> None:
    """Published files mix types within a layer, where projections cannot be joined."""
    source = write_tiny_gguf(tmp_path / "model.gguf", types=MIXED[name], tied=tied)
    check_against_reference(export(source), source)


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_shapes_compute_the_reference_logits(
    tmp_path: Path, export: Callable[..., Bundle], name: str
) -> None:
    """Heads wider than hidden / heads, as many KV heads as heads, another rotary base."""
    source = write_tiny_gguf(tmp_path / "model.gguf", types="Q8_0", shape=UNUSUAL[name])
    check_against_reference(export(source), source)


def test_settings_that_gguf_may_leave_out_have_llama_cpp_defaults(
    tmp_path: Path, export: Callable[..., Bundle]
) -> None:
    """Older converters write fewer keys for the same model."""
    left_out = [
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.rope.freq_base",
        "llama.rope.dimension_count",
        "llama.vocab_size",
    ]
    shape = Shape(kv_heads=4)
    source = write_tiny_gguf(tmp_path / "few.gguf", shape=shape, override=dict.fromkeys(left_out))
    full = write_tiny_gguf(tmp_path / "full.gguf", shape=shape)
    expected = ReferenceLlama(full).logits(IDS)
    bundle = export(source)
    assert_close(bundle.prefill(IDS, bundle.empty_kv()), expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["Q4_1", *MIXED])
def test_float32_bundle_computes_what_the_source_bundle_does(
    tmp_path: Path, export: Callable[..., Bundle], name: str, tied: bool
) -> None:
    """`--weights float32` expands; it must not change the model."""
    types = MIXED.get(name, name)
    source = write_tiny_gguf(tmp_path / "model.gguf", types=types, tied=tied)
    logits = []
    for weights in ("source", "float32"):
        bundle = export(source, weights)
        kv = bundle.empty_kv()
        first = bundle.prefill(IDS[:-1], kv)
        logits.append(np.concatenate([first, bundle.decode(IDS[-1:], kv, [len(IDS) - 1])]))
    assert_close(logits[1], logits[0])
    assert_close(logits[1], ReferenceLlama(source).logits(IDS))


def test_default_accuracy_is_near_the_reference(
    tmp_path: Path, export: Callable[..., Bundle], tiny_gguf: Path
) -> None:
    """int8 activations cost a little, and only a little."""
    bundle = export(tiny_gguf)
    bundle._sessions["prefill"] = open_session(bundle.folder / "prefill.onnx", accuracy_level=4)
    found = bundle.prefill(IDS, bundle.empty_kv())
    expected = ReferenceLlama(tiny_gguf).logits(IDS)
    assert np.abs(found - expected).max() / np.abs(expected).max() < 0.05
