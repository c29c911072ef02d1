"""Llamas of random weights: shapes of known models, and their tensors piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

PIECE = 1 << 22  # numbers that are made at a time: 16 MB in float32
_LAYER = "model.layers."


@dataclass(frozen=True)
class Shape:
    """What config.json says of a model that computes as Llama does. rope: `rope_parameters`."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    context: int
    rope: Mapping[str, Any]
    head_dim: int
    family: str = "llama"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def config_json(self) -> dict[str, Any]:
        """The settings, as transformers 5 spells them."""
        return {
            "architectures": [f"{self.family.capitalize()}ForCausalLM"],
            "bos_token_id": 0,
            "dtype": "bfloat16",
            "eos_token_id": 1,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "max_position_embeddings": self.context,
            "model_type": self.family,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_parameters": dict(self.rope),
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
            **self.extra,
        }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _plain() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0}


SHAPES: Mapping[str, Shape] = {
    "llama-3.2-1b": Shape(
        16, 2048, 8192, 32, 8, 128256, tied=True, context=131072, rope=_llama3(32.0), head_dim=64
    ),
    "llama-3.1-8b": Shape(
        32, 4096, 14336, 32, 8, 128256, tied=False, context=131072, rope=_llama3(8.0), head_dim=128
    ),
    "tinyllama-1.1b": Shape(
        22, 2048, 5632, 32, 4, 32000, tied=False, context=2048, rope=_plain(), head_dim=64
    ),
    "mistral-7b": Shape(
        *(32, 4096, 14336, 32, 8, 32000),
        tied=False,
        context=4096,
        rope=_plain(),
        head_dim=128,
        family="mistral",
        extra={"sliding_window": None},
    ),
    # For tests: blocks of 32 fit into its rows, and nothing else is whole.
    "tiny": Shape(2, 64, 96, 4, 2, 300, tied=True, context=128, rope=_llama3(8.0), head_dim=16),
}


@dataclass(frozen=True)
class Tensor:
    """A weight under Hugging Face's name; its numbers are made when they are asked for.

    heads: heads that its rows belong to, for q and k; else 0.
    """

    name: str
    shape: tuple[int, ...]
    seed: int
    heads: int = 0

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def pieces(self) -> Iterator[FloatArray]:
        """float32 [rows, columns] of whole rows and whole heads, or [n]; the same at every call.

        Values are bfloat16's, so that every format starts from the same ones. Matrices are
        normal with deviation columns ** -0.5, norms lie around 1: what goes into a layer and the
        logits that come out are of the size of 1.
        """
        # A stream of its own for each tensor: their order and number change nothing.
        rng = np.random.default_rng((self.seed, zlib.crc32(self.name.encode())))
        if len(self.shape) == 1:
            yield _rounded(1 + 0.1 * rng.standard_normal(self.shape, np.float32))
            return
        rows, columns = self.shape
        whole = rows // self.heads if self.heads else 1
        step = max(1, PIECE // columns // whole) * whole
        for first in range(0, rows, step):
            values = rng.standard_normal((min(step, rows - first), columns), np.float32)
            yield _rounded(values * np.float32(columns**-0.5))


def tensors(shape: Shape, seed: int) -> Iterator[Tensor]:
    """Every tensor of the model, in the order of its files."""
    hidden, head_dim = shape.hidden, shape.head_dim
    q, kv = shape.heads * head_dim, shape.kv_heads * head_dim
    yield Tensor("model.embed_tokens.weight", (shape.vocab, hidden), seed)
    for i in range(shape.layers):
        at = f"{_LAYER}{i}"
        yield Tensor(f"{at}.input_layernorm.weight", (hidden,), seed)
        yield Tensor(f"{at}.self_attn.q_proj.weight", (q, hidden), seed, shape.heads)
        yield Tensor(f"{at}.self_attn.k_proj.weight", (kv, hidden), seed, shape.kv_heads)
        yield Tensor(f"{at}.self_attn.v_proj.weight", (kv, hidden), seed)
        yield Tensor(f"{at}.self_attn.o_proj.weight", (hidden, q), seed)
        yield Tensor(f"{at}.post_attention_layernorm.weight", (hidden,), seed)
        yield Tensor(f"{at}.mlp.gate_proj.weight", (shape.inner, hidden), seed)
        yield Tensor(f"{at}.mlp.up_proj.weight", (shape.inner, hidden), seed)
        yield Tensor(f"{at}.mlp.down_proj.weight", (hidden, shape.inner), seed)
    yield Tensor("model.norm.weight", (hidden,), seed)
    if not shape.tied:
        yield Tensor("lm_head.weight", (shape.vocab, hidden), seed)


def _rounded(values: FloatArray) -> FloatArray:
    """To bfloat16 and back, cut off: the lower half of the bits goes."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def bfloat16(values: FloatArray) -> NDArray[np.uint16]:
    """The upper half of the bits, which is all that `Tensor.pieces` fills."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
