"""Names, dtypes and shapes of every graph's inputs and outputs.

Both rooms that meet a graph read this file: `export` builds to it, `runtime` binds by it.
It imports nothing heavy, so that a serving machine can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FloatDtype = Literal["float32", "float16", "bfloat16"]
KvDtype = Literal["float32", "float16", "bfloat16", "int8"]
Dtype = Literal["int32", "int64", "float32", "float16", "bfloat16", "int8"]
Dim = int | str

DECODE = "decode"
PREFILL = "prefill"
PREFILL_RAGGED = "prefill_ragged"
SAMPLE = "sample"
GRAPH_NAMES = (DECODE, PREFILL, PREFILL_RAGGED, SAMPLE)  # what every bundle has
# Decoding with prefill's weights, in a bundle whose phases differ: faster where many rows run.
DECODE_MANY = "decode_many"
DECODES = (DECODE, DECODE_MANY)

INPUT_IDS = "input_ids"
LOGITS = "logits"
LOGITS_INDEX = "logits_index"
SEQLENS_K = "seqlens_k"
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"
QUERY_SEQLENS = "query_seqlens"


Part = Literal["key", "value"]
PARTS: tuple[Part, Part] = ("key", "value")


def past_name(layer: int, part: Part) -> str:
    """The input that holds a layer's keys or values before the call."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: Part) -> str:
    """The output that holds them after it."""
    return f"present.{layer}.{part}"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. Symbolic dims: batch, chunk, n (logits per row), capacity, m, k."""

    name: str
    dtype: Dtype
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class GraphContract:
    """The inputs and outputs of one graph, in their order in the graph."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def decoder_contract(
    name: str,
    *,
    vocab_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: KvDtype = "float32",
) -> GraphContract:
    """The contract of `decode` and `decode_many`, `prefill` or `prefill_ragged`.

    seqlens_k: total length - 1 of each row after this call; total_sequence_length: the largest
    total length, a scalar in host memory; query_seqlens: valid tokens of each right-padded row;
    logits_index: positions within the chunk whose logits are wanted. Logits are float32 whatever
    the graph computes in: samplers, and comparisons of bundles, have one form of them.
    """
    if name not in (*DECODES, PREFILL, PREFILL_RAGGED):
        raise ValueError(f"{name!r} is not a decoder graph")
    batch: Dim = 1 if name == PREFILL else "batch"
    chunk: Dim = 1 if name in DECODES else "chunk"
    kv_shape: tuple[Dim, ...] = (batch, num_kv_heads, "capacity", head_dim)
    inputs = [
        TensorSpec(INPUT_IDS, "int64", (batch, chunk)),
        TensorSpec(SEQLENS_K, "int32", (batch,)),
        TensorSpec(TOTAL_SEQUENCE_LENGTH, "int32", ()),
    ]
    if name == PREFILL_RAGGED:
        inputs.append(TensorSpec(QUERY_SEQLENS, "int32", (batch,)))
    if name not in DECODES:
        inputs.append(TensorSpec(LOGITS_INDEX, "int32", (batch, "n")))
    outputs = [TensorSpec(LOGITS, "float32", (batch, 1 if name in DECODES else "n", vocab_size))]
    for layer in range(num_layers):
        inputs.append(TensorSpec(past_name(layer, "key"), kv_dtype, kv_shape))
        inputs.append(TensorSpec(past_name(layer, "value"), kv_dtype, kv_shape))
        outputs.append(TensorSpec(present_name(layer, "key"), kv_dtype, kv_shape))
        outputs.append(TensorSpec(present_name(layer, "value"), kv_dtype, kv_shape))
    return GraphContract(name, tuple(inputs), tuple(outputs))
