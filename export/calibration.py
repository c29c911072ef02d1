"""A model run layer by layer over a calibration text, with taps on what its linear layers read.

Each layer is a small float32 graph whose weights are inputs: ONNX Runtime runs it, nothing is
written to disk, and a layer may be run again with other weights (rounded, or scaled). One layer's
weights and statistics are in memory at a time, besides the hidden states of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript import GraphBuilder

from ortolan.errors import CheckpointError
from ortolan.export.write_weights import Checkpoint
from ortolan.graphs.attention_onnx import ONNX
from ortolan.graphs.build import IR_VERSION
from ortolan.graphs.decoder import Layer
from ortolan.graphs.flavor import CallInputs
from ortolan.graphs.formats import (
    EMBEDDING,
    FINAL_NORM,
    FLOAT32,
    LAYERS,
    layer_name,
    plan_layer,
    weight_shapes,
)
from ortolan.graphs.manifest import ModelConfig
from ortolan.graphs.rotary import config_rotary_tables, rope_tables
from ortolan.optional import require

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# A layer's weights in float32 by their names within it: "self_attn.q_proj" [N, K],
# "input_layernorm" [hidden], "mlp.down_proj.bias" [N], ...
LayerWeights = Mapping[str, Floats]

# What linear layers read, and which of them read it.
Tap = Literal["attention_in", "attention_out", "mlp_in", "mlp_down"]
TAPS: Mapping[Tap, tuple[str, ...]] = {
    "attention_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_down": ("mlp.down_proj",),
}

# Called with what each tap saw of some windows: [rows, K].
Sink = Callable[[Mapping[Tap, Floats]], None]

# Hidden states after a layer, and its taps if they are wanted, from those before it.
Step = Callable[[Floats, bool], tuple[Floats, dict[Tap, Floats]]]

_TAP_BYTES = 16 << 20  # of the widest tap at a time
_HEAD_ROWS = 2048  # of what the head reads


@dataclass
class InputStats:
    """What is remembered of a linear layer's inputs x.

    moments: the sum of x x^T over all rows, float32 [K, K]. absmax: the largest |x| of each
    channel, [K]. rows: how many inputs were seen.
    """

    moments: Floats
    absmax: Floats
    rows: int = 0

    @classmethod
    def empty(cls, inputs: int) -> InputStats:
        return cls(np.zeros((inputs, inputs), np.float32), np.zeros(inputs, np.float32))

    def add(self, x: Floats) -> None:
        """Inputs [rows, K]."""
        self.moments += x.T @ x
        np.maximum(self.absmax, np.abs(x).max(0, initial=0), out=self.absmax)
        self.rows += len(x)

    def divided(self, scale: Floats) -> InputStats:
        """The same of x / scale, a positive number for each channel."""
        inverse = 1 / scale
        moments = np.asarray(self.moments * inverse * inverse[:, None], np.float32)
        return InputStats(moments, np.asarray(self.absmax * inverse, np.float32), self.rows)


@dataclass
class PairedStats:
    """Statistics of inputs x of a layer behind rounded ones, beside those x' of the exact model.

    cross: the sum of x' x^T over all rows, float32 [K, K].
    """

    seen: InputStats
    cross: Floats

    @classmethod
    def empty(cls, inputs: int) -> PairedStats:
        return cls(InputStats.empty(inputs), np.zeros((inputs, inputs), np.float32))

    def add(self, x: Floats, exact: Floats) -> None:
        """Inputs of both, [rows, K]."""
        self.seen.add(x)
        self.cross += exact.T @ x


class LayerRunner:
    """Hidden states of a calibration text, from one layer to the next."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, windows: Ids) -> None:
        """`windows`: token ids [windows, chunk], each read as a context of its own.

        Raises MissingDependencyError without ONNX Runtime.
        """
        self.config = config
        self.windows = windows
        self._checkpoint = checkpoint
        self._ort = require("onnxruntime", "cpu", "calibrating weights")
        # Layers that are alike but for their weights share a graph.
        self._graphs: dict[tuple[object, ...], tuple[Any, dict[str, tuple[str, ...]]]] = {}
        chunk = windows.shape[1]
        self._tables = {
            name: table
            for rope in config.ropes
            for name, table in zip(
                rope_tables(rope), config_rotary_tables(config, rope, chunk), strict=True
            )
        }

    def embedded(self, table: Floats | None = None) -> Floats:
        """Hidden states [windows, chunk, hidden] before the first layer.

        table: the embedding [vocab, hidden] to take instead of the checkpoint's.
        """
        used, inverse = np.unique(self.windows, return_inverse=True)
        if table is None:
            rows = self._checkpoint.read(EMBEDDING).take_rows(used).dequantized()
        else:
            rows = table[used]
        rows *= np.float32(self.config.embedding_multiplier)
        return np.asarray(rows[inverse.reshape(self.windows.shape)])

    def weights(self, layer: int) -> dict[str, Floats]:
        """The layer's weights as the checkpoint has them, in float32."""
        prefix = layer_name(layer, "")
        return {
            name.removeprefix(prefix): self._checkpoint.read(name).dequantized()
            for name in weight_shapes(self.config)
            if name.startswith(prefix)
        }

    def run(
        self, layer: int, weights: LayerWeights, hidden: Floats, sink: Sink | None = None
    ) -> Floats:
        """Hidden states [windows, chunk, hidden] after the layer; `sink` gets what the taps saw.

        Raises CheckpointError where numbers are not finite any more.
        """
        step = self._step(layer, weights)
        after = np.empty_like(hidden)
        for part in self._parts(hidden):
            after[part], taps = step(hidden[part], sink is not None)
            if sink is not None:
                sink(taps)
        return after

    def _parts(self, hidden: Floats) -> list[slice]:
        """Windows that go through a layer together."""
        step = max(1, _TAP_BYTES // (4 * hidden.shape[1] * self.config.intermediate_size))
        return [slice(start, start + step) for start in range(0, len(hidden), step)]

    def _step(self, layer: int, weights: LayerWeights) -> Step:
        """The layer with these weights, for some windows at a time."""
        session, parts = self._graph(layer)
        known = _inputs(session)
        feeds = {name: _stacked(weights, name, part) for name, part in parts.items()}
        feeds |= {name: self._tables[name] for name in self._tables if name in known}
        names = [output.name for output in session.get_outputs()]

        def step(hidden: Floats, tapped: bool) -> tuple[Floats, dict[Tap, Floats]]:
            call = _call_inputs(self.config, *hidden.shape[:2])
            inputs = {name: value for name, value in call.items() if name in known}
            wanted = names if tapped else names[:1]
            found = dict(
                zip(wanted, session.run(wanted, {**feeds, **inputs, "hidden": hidden}), strict=True)
            )
            after = found[names[0]]
            if not np.isfinite(after).all():
                raise CheckpointError(
                    f"layer {layer} computes numbers that are not finite on the calibration text; "
                    "its weights may be damaged: fetch the checkpoint again"
                )
            taps = {t: found[t].reshape(-1, found[t].shape[-1]) for t in TAPS if t in found}
            return after, taps

        return step

    def statistics(
        self, layer: int, weights: LayerWeights, hidden: Floats
    ) -> tuple[dict[Tap, InputStats], Floats]:
        """What each tap saw with these weights, and the hidden states after the layer."""
        found: dict[Tap, InputStats] = {}

        def remember(taps: Mapping[Tap, Floats]) -> None:
            for tap, x in taps.items():
                if tap not in found:
                    found[tap] = InputStats.empty(x.shape[1])
                found[tap].add(x)

        after = self.run(layer, weights, hidden, remember)
        return found, after

    def paired_statistics(
        self, layer: int, weights: LayerWeights, exact: Floats, hidden: Floats
    ) -> tuple[dict[Tap, PairedStats], Floats]:
        """What each tap saw of `hidden`, beside what it saw of `exact`; and `exact` afterwards.

        Both are hidden states [windows, chunk, hidden] of the same text before the layer.
        """
        step = self._step(layer, weights)
        found: dict[Tap, PairedStats] = {}
        after = np.empty_like(exact)
        for part in self._parts(exact):
            after[part], wanted = step(exact[part], True)
            _, seen = step(hidden[part], True)
            for tap, x in seen.items():
                if tap not in found:
                    found[tap] = PairedStats.empty(x.shape[1])
                found[tap].add(x, wanted[tap])
        return found, after

    def head_inputs(self, hidden: Floats, norm: Floats | None = None) -> Floats:
        """What the output head reads, given hidden states [..., hidden] after the last layer.

        norm: the final norm's weights [hidden] to take instead of the checkpoint's.
        """
        if norm is None:
            norm = self._checkpoint.read(FINAL_NORM).dequantized()
        mean_square = np.mean(np.square(hidden, dtype=np.float64), -1, keepdims=True)
        scaled = hidden / np.sqrt(mean_square + self.config.rms_norm_eps)
        return np.asarray(scaled * norm, np.float32)

    def head_statistics(self, hidden: Floats, exact: Floats | None = None) -> PairedStats:
        """The statistics of `head_inputs`, some windows at a time; beside those of `exact`."""
        stats = PairedStats.empty(self.config.hidden_size)
        step = max(1, _HEAD_ROWS // hidden.shape[1])
        for start in range(0, len(hidden), step):
            x, wanted = (
                self.head_inputs(states[start : start + step]).reshape(-1, hidden.shape[-1])
                for states in (hidden, hidden if exact is None else exact)
            )
            stats.add(x, wanted)
        return stats

    def _graph(self, layer: int) -> tuple[Any, dict[str, tuple[str, ...]]]:
        """The session of a layer's graph, and its parameters with the weights they are made of."""
        config = self.config
        kind = (config.layer_window(layer), config.layer_turns(layer), config.layer_rope(layer))
        if kind not in self._graphs:
            model, parts = build_layer_graph(config, layer)
            session = self._session(ir.to_proto(model).SerializeToString())
            self._graphs[kind] = session, parts
        return self._graphs[kind]

    def _session(self, model: bytes) -> Any:
        """A session with threads of its own or, where the process has a pool for all, on that."""
        options = self._ort.SessionOptions()
        options.log_severity_level = 3  # past and present are no one buffer here: a known cost
        # Between runs the cores are numpy's.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = ["CPUExecutionProvider"]
        try:
            return self._ort.InferenceSession(model, options, providers, enable_fallback=0)
        except RuntimeError as error:
            if "global thread pool" not in str(error):
                raise
        options.use_per_session_threads = False
        return self._ort.InferenceSession(model, options, providers)


def build_layer_graph(
    config: ModelConfig, layer: int
) -> tuple[ir.Model, dict[str, tuple[str, ...]]]:
    """One decoder layer in float32 whose parameters are inputs, and the weights of each.

    Input `hidden` [batch, chunk, hidden]; the first output is the hidden states after the layer,
    the others are named by their tap.
    """
    names = weight_shapes(config)
    formats = dict.fromkeys(names, FLOAT32)
    plan = plan_layer(config, formats, layer)
    graph = ir.Graph([], [], nodes=[], name="layer", opset_imports=dict(ONNX.opsets))
    builder = GraphBuilder(graph)
    float32, int32, int64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
    kv: list[int | str | None] = ["batch", config.num_kv_heads, "chunk", config.head_dim]
    hidden = builder.input("hidden", float32, ["batch", "chunk", config.hidden_size])
    past = builder.input("past_key", float32, kv), builder.input("past_value", float32, kv)
    half = (config.rotary_dim or config.head_dim) // 2
    rope = config.layer_rope(layer)
    cos, sin = (builder.input(name, float32, ["chunk", half]) for name in rope_tables(rope))
    call = CallInputs(
        builder.input("ids", int64, ["batch", "chunk"]),
        builder.input("seqlens_k", int32, ["batch"]),
        builder.input("total_sequence_length", int32, []),
        None,
        past[0],
        {rope: (cos, sin)},
    )
    module = Layer(config, plan, layer, ONNX)
    inputs = ONNX.prepare(builder.op, config, call)
    x, delta, _ = module(builder.op, hidden, None, inputs, past)
    after = builder.op.Add(x, delta)
    graph.outputs.append(_output(after, "after"))
    parts: dict[str, tuple[str, ...]] = {}
    prefix = layer_name(layer, "")
    joined = {
        projection.name.removeprefix(prefix): tuple(
            p.removeprefix(prefix) for p in projection.parts
        )
        for projection in (*plan.qkv, plan.attention_out, *plan.gate_up, plan.down)
    }
    readers = {parts[0]: tap for tap, parts in TAPS.items()}
    tapped: dict[Tap, ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None:
            continue
        own, _, kind = name.removeprefix(LAYERS).rpartition(".")
        made_of = joined.get(own, (own,))
        parts[name] = tuple(f"{part}.bias" for part in made_of) if kind == "bias" else made_of
        if kind == "weight" and made_of[0] in readers:
            (product,) = value.consumers()
            read = product.inputs[0]
            assert read is not None
            tapped[readers[made_of[0]]] = read
        del graph.initializers[name]
        graph.inputs.append(value)
    for tap in TAPS:
        # A copy: what two taps read may be one value, or the graph's input.
        graph.outputs.append(_output(builder.op.Identity(tapped[tap]), tap))
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="ortolan"), parts


def _output(value: ir.Value, name: str) -> ir.Value:
    value.name = name
    value.type = ir.TensorType(ir.DataType.FLOAT)
    return value


def _inputs(session: Any) -> set[str]:
    return {value.name for value in session.get_inputs()}


def _stacked(weights: LayerWeights, name: str, parts: tuple[str, ...]) -> Floats:
    """A parameter of the graph: matrices side by side as [K, N], vectors one after another."""
    arrays = [weights[part] for part in parts]
    if arrays[0].ndim == 1:
        return np.concatenate(arrays)
    return np.ascontiguousarray(np.concatenate(arrays).T)


def _call_inputs(config: ModelConfig, batch: int, chunk: int) -> dict[str, Any]:
    """Whole windows from position 0 on."""
    kv = np.zeros((batch, config.num_kv_heads, chunk, config.head_dim), np.float32)
    return {
        "ids": np.zeros((batch, chunk), np.int64),  # read for its shape
        "seqlens_k": np.full(batch, chunk - 1, np.int32),
        "total_sequence_length": np.array(chunk, np.int32),
        "past_key": kv,
        "past_value": kv,
    }
