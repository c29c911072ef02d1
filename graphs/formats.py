"""How weights are stored, and which of a layer's projections are stored as one.

This file imports nothing heavy: the reader of a checkpoint and the builder of a graph both
lean on it, and neither needs the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ortolan.graphs.manifest import W8A8_PRECISION, ModelConfig

StorageDtype = Literal["float32", "float16", "bfloat16", "int4", "int8"]

BITS: dict[StorageDtype, int] = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int4": 4,
    "int8": 8,
}


@dataclass(frozen=True)
class WeightFormat:
    """How one weight matrix is stored.

    int4 and int8 are signed codes in blocks of `block_size` inputs that share a float32 scale;
    with `affine`, each block has a float32 offset too:
    w[n, k] = codes[n, k] * scale[n, k // B] + offset[n, k // B].

    w8a8 (int8, no blocks) has one scale for each output, and stands for a product of integers:
    what it is multiplied with is rounded to 8 bits too, with one scale for each token.
    """

    dtype: StorageDtype
    block_size: int = 0
    affine: bool = False
    w8a8: bool = False

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

    @property
    def blocked(self) -> bool:
        return self.block_size > 0

    def num_blocks(self, inputs: int) -> int:
        """Blocks along K; the last may be shorter than the others."""
        return -(-inputs // self.block_size)

    def __str__(self) -> str:
        if self.w8a8:
            return W8A8_PRECISION
        if not self.blocked:
            return self.dtype
        return f"{self.dtype} block {self.block_size}" + (" + offsets" if self.affine else "")


FLOAT32 = WeightFormat("float32")
W8A8 = WeightFormat("int8", w8a8=True)

# A weight's name, as in a Hugging Face state dict without ".weight" -> its format. Biases keep
# their ".bias".
Formats = Mapping[str, WeightFormat]

EMBEDDING = "model.embed_tokens"
# What looked-up rows are multiplied with, channel by channel, where the table is stored scaled.
EMBEDDING_SCALE = "model.embed_scale"
LM_HEAD = "lm_head"
FINAL_NORM = "model.norm"
LAYERS = "model.layers."
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def layer_name(layer: int, part: str) -> str:
    """A layer's module by its state-dict name."""
    return f"{LAYERS}{layer}.{part}"


@dataclass(frozen=True)
class LayerNorms:
    """Names of a layer's norms, by what they norm; None for one that there is not.

    attention_in, mlp_in: what the branch reads; attention_out, mlp_out: what it gives.
    """

    attention_in: str | None
    attention_out: str | None
    mlp_in: str | None
    mlp_out: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """Those that there are."""
        all_four = (self.attention_in, self.attention_out, self.mlp_in, self.mlp_out)
        return tuple(name for name in all_four if name is not None)


def layer_norms(config: ModelConfig) -> LayerNorms:
    """The norms of each layer of this model.

    Hugging Face's `post_attention_layernorm` is the one before the MLP, unless there are norms
    after the branches.
    """
    pre, post = config.pre_norms, config.post_norms
    before_mlp = "pre_feedforward_layernorm" if post else "post_attention_layernorm"
    return LayerNorms(
        attention_in="input_layernorm" if pre else None,
        attention_out="post_attention_layernorm" if post else None,
        mlp_in=before_mlp if pre else None,
        mlp_out="post_feedforward_layernorm" if post else None,
    )


def qk_norm_sizes(config: ModelConfig) -> tuple[int, int]:
    """The widths of q's and k's norm."""
    if not config.qk_norm_joint:
        return config.head_dim, config.head_dim
    return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim


@dataclass(frozen=True)
class Projection:
    """A linear layer as stored: the source weights it is made of, one after another in N."""

    name: str
    parts: tuple[str, ...]
    inputs: int
    widths: tuple[int, ...]
    format: WeightFormat
    bias: bool = False

    @property
    def outputs(self) -> int:
        return sum(self.widths)


def _joined(
    layer: int,
    block: str,
    joint: str,
    parts: dict[str, int],
    inputs: int,
    formats: Formats,
    bias: bool,
    apart: bool = False,
) -> tuple[Projection, ...]:
    """One projection for all parts where their formats agree, else one for each."""
    names = {part: layer_name(layer, f"{block}.{part}") for part in parts}
    kinds = {formats[name] for name in names.values()}
    if len(kinds) == 1 and not apart:
        name = layer_name(layer, f"{block}.{joint}")
        return (
            Projection(
                name, tuple(names.values()), inputs, tuple(parts.values()), kinds.pop(), bias
            ),
        )
    return tuple(
        Projection(names[part], (names[part],), inputs, (width,), formats[names[part]], bias)
        for part, width in parts.items()
    )


@dataclass(frozen=True)
class LayerPlan:
    """The projections of one decoder layer. `qkv` and `gate_up` hold one entry when joined.

    Joining is exact: every output column keeps its own codes, scales and offsets. Integer products
    of gate and up share what is rounded anyway, and stay apart: no node need split their outputs.
    affine: whether the model has offsets, in this layer or another.
    """

    qkv: tuple[Projection, ...]
    attention_out: Projection
    gate_up: tuple[Projection, ...]
    down: Projection
    affine: bool


def plan_layer(config: ModelConfig, formats: Formats, layer: int) -> LayerPlan:
    """How that layer's projections are stored, given the formats of its weights."""
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def single(part: str, inputs: int, outputs: int, bias: bool) -> Projection:
        name = layer_name(layer, part)
        return Projection(name, (name,), inputs, (outputs,), formats[name], bias)

    qkv = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    apart = all(formats[layer_name(layer, f"mlp.{part}")].w8a8 for part in gate_up)
    return LayerPlan(
        qkv=_joined(layer, "self_attn", "qkv_proj", qkv, hidden, formats, config.qkv_bias),
        attention_out=single("self_attn.o_proj", q_width, hidden, config.attention_out_bias),
        gate_up=_joined(
            layer, "mlp", "gate_up_proj", gate_up, hidden, formats, config.mlp_bias, apart
        ),
        down=single("mlp.down_proj", inner, hidden, config.mlp_bias),
        affine=any(fmt.affine for name, fmt in formats.items() if name.startswith(LAYERS)),
    )


def head_projection(config: ModelConfig, formats: Formats) -> Projection:
    """The output head of a model that does not share its embedding's table."""
    return Projection(
        LM_HEAD, (LM_HEAD,), config.hidden_size, (config.vocab_size,), formats[LM_HEAD]
    )


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight, norm and bias that a model of this shape has, by its name in `Formats`."""
    c = config
    q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    matrices = {
        "self_attn.q_proj": (q_width, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (kv_width, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (kv_width, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, q_width, c.attention_out_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, c.hidden_size)}
    for layer in range(c.num_layers):
        for norm in layer_norms(c).names:
            shapes[layer_name(layer, norm)] = (c.hidden_size,)
        for part, (outputs, inputs, bias) in matrices.items():
            shapes[layer_name(layer, part)] = (outputs, inputs)
            if bias:
                shapes[layer_name(layer, f"{part}.bias")] = (outputs,)
        if c.qk_norm:
            for norm, size in zip(QK_NORMS, qk_norm_sizes(c), strict=True):
                shapes[layer_name(layer, norm)] = (size,)
    shapes[FINAL_NORM] = (c.hidden_size,)
    if not c.tie_embeddings:
        shapes[LM_HEAD] = (c.vocab_size, c.hidden_size)
    return shapes
