"""Tiny Llama checkpoints in GGUF form: random weights, but a whole tokenizer and chat template."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from random_blocks import random_rows
from tokenizers import pre_tokenizers

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
MERGES = re.split(
    r"[|\n]",
    "Ġ t|Ġ a|h e|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|Ġ o|e n|Ġ c|i t|i s|a n|o r|e s|Ġ b|e d\n"
    "Ġ f|in g|Ġ p|o u|Ġa n|a l|a r|Ġt o|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|i c|a s|l e|Ġt h|i on|o m",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The settings of a tiny model, under GGUF's defaults where they have one."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    vocab: int = len(CONTROL_TOKENS) + 256 + len(MERGES)  # 300
    context: int = 64
    theta: float = 10000.0
    epsilon: float = 1e-5


def settings(shape: Shape) -> dict[str, Any]:
    """The metadata of such a checkpoint, its tokenizer included; int, float, str or list."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*CONTROL_TOKENS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    return {
        "llama.block_count": shape.layers,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.inner,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": shape.epsilon,
        "llama.rope.freq_base": shape.theta,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.vocab_size": shape.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def random_tensors(shape: Shape, *, tied: bool, seed: int) -> dict[str, np.ndarray]:
    """float32 weights under GGUF's names, scaled so that every part of the model matters."""
    rng = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> np.ndarray:
        values = rng.standard_normal((outputs, inputs)) * scale / np.sqrt(inputs)
        return values.astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(shape.hidden)).astype(np.float32)

    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {"token_embd.weight": matrix(shape.vocab, shape.hidden, 4.0)}
    for i in range(shape.layers):
        layer = {
            "attn_norm": norm(),
            "attn_q": matrix(q_width, shape.hidden, 2.0),  # sharp attention: positions count
            "attn_k": matrix(kv_width, shape.hidden, 2.0),
            "attn_v": matrix(kv_width, shape.hidden),
            "attn_output": matrix(shape.hidden, q_width),
            "ffn_norm": norm(),
            "ffn_gate": matrix(shape.inner, shape.hidden),
            "ffn_up": matrix(shape.inner, shape.hidden),
            "ffn_down": matrix(shape.hidden, shape.inner),
        }
        tensors |= {f"blk.{i}.{name}.weight": value for name, value in layer.items()}
    tensors["output_norm.weight"] = norm()
    if not tied:
        tensors["output.weight"] = matrix(shape.vocab, shape.hidden)
    return tensors


def write_tiny_gguf(
    path: Path,
    *,
    types: str | Mapping[str, str] = "F32",
    tied: bool = True,
    shape: Shape | None = None,
    override: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    drop: Collection[str] = (),
    architecture: str = "llama",
    seed: int = 0,
) -> Path:
    """Write a checkpoint and return its path; the same arguments give the same bytes.

    types: tensor type of every matrix, or tensor name patterns -> type, the last match counting
    (what no pattern matches is F32; norms are F32 unless a pattern names them).
    override: metadata laid over `settings`, None removing a key. extra: tensors added or replaced,
    written as F32. drop: tensors left out.
    """
    shape = shape or Shape()
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**settings(shape), **(override or {})}.items():
        add_setting(writer, key, value)
    tensors = random_tensors(shape, tied=tied, seed=seed)
    patterns = {"*": types} if isinstance(types, str) else types
    for name, values in tensors.items():
        if name in drop or name in (extra or {}):
            continue
        kind = GgmlType[_type_of(name, patterns)]
        raw = gguf.quants.quantize(values, kind) if _can_quantize(kind) else _random(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def export_long(folder: Path, context: int) -> Path:
    """A Q4_1 checkpoint whose answers may be long, exported with default options to folder/tiny."""
    from ortolan.export.exporter import ExportOptions, export_bundle

    gguf_file = write_tiny_gguf(folder / "tiny.gguf", types="Q4_1", shape=Shape(context=context))
    export_bundle(str(gguf_file), folder / "tiny", ExportOptions())
    return folder / "tiny"


def add_setting(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a key-value pair under the type that converters use; None writes nothing."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 2**32 else writer.add_int64)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _type_of(name: str, patterns: Mapping[str, str]) -> str:
    found = "F32"
    for pattern, kind in patterns.items():
        if fnmatch.fnmatch(name, pattern) and ("norm" not in name or "norm" in pattern):
            found = kind
    return found


_READ_ONLY = ("NVFP4", "Q1_0", "Q8_1")


def _can_quantize(kind: GgmlType) -> bool:
    return kind.name[0] != "I" and not kind.name.endswith("_K") and kind.name not in _READ_ONLY


def _random(values: np.ndarray, kind: GgmlType) -> np.ndarray:
    """Random blocks of the right size, for types that the package only reads."""
    return random_rows(kind, *values.shape, seed=int(values.sum() * 1000) & 0xFFFF)
