"""The seam between the decoder and its attention flavors.

A flavor is one way to say the same model in operators. The decoder asks it for the parts that
differ; everything else (projections, MLP, residuals, the contract) is common to all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript import nn

from ortolan.graphs.contract import KvDtype
from ortolan.graphs.formats import LayerPlan, WeightFormat
from ortolan.graphs.manifest import Dtypes, ModelConfig, RopeName


@dataclass(frozen=True)
class CallInputs:
    """What attention reads besides its own past: graph inputs (see contract.py) and the tables.

    ids: [batch, chunk]; past: any layer's past keys, for its shape; ropes: cosine and sine tables.
    """

    ids: ir.Value
    seqlens_k: ir.Value
    total_sequence_length: ir.Value
    query_seqlens: ir.Value | None
    past: ir.Value
    ropes: Mapping[RopeName, tuple[ir.Value, ir.Value]]


@dataclass(frozen=True)
class Flavor:
    """What one flavor is made of.

    opsets: domain -> version. head_dim_multiple: what head_dim and its rotated part must divide by.
    signed_table: a blocked embedding is stored as signed codes, those of 4 bits packed in bytes,
    and a tied head has views of it by blocks; otherwise it is as GatherBlockQuantized reads it.
    kv_dtypes: what the KV cache may hold.
    rows: the layers of a model with offsets work on [batch * chunk, hidden], which makes these
    cheaper (see Linear); otherwise on [batch, chunk, hidden].
    standard: linear layers have operators of the ONNX standard alone.
    norm: (size, epsilon, module name) -> module (x, delta or None) -> (normed sum, sum).
    prepare: what all layers share, computed once per call; each attention gets it as `inputs`.
    attention: (config, plan, layer, dtypes) -> module (x, inputs, past) -> (output, key, value).
    embedding: (vocab, hidden, format) -> module ids -> rows; tied_head: over that module.
    """

    name: str
    opsets: Mapping[str, int]
    head_dim_multiple: int
    signed_table: bool
    kv_dtypes: frozenset[KvDtype]
    rows: bool
    standard: bool
    norm: Callable[[int, float, str | None], nn.Module]
    prepare: Callable[[Any, ModelConfig, CallInputs], Any]
    attention: Callable[[ModelConfig, LayerPlan, int, Dtypes], nn.Module]
    embedding: Callable[[int, int, WeightFormat], nn.Module]
    tied_head: Callable[[Any], nn.Module]
