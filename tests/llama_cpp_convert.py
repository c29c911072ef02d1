"""A Hugging Face folder as llama.cpp's converter would write it to GGUF, in float32.

Written from llama.cpp's conventions, with none of our code: names, keys, row order, rope factors.
The vocabulary is tiny_llama's, of 300 tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_llama
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Norms of families that have some after the branches.
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA = ("gemma", "gemma2", "gemma3_text")
PERMUTED = ("llama", "mistral", "smollm3", "granite")  # converters that derive from LlamaModel


def convert(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of the GGUF file; `changes` are laid over config.json."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        base, _, suffix = name.rpartition(".")
        if config["model_type"] in PERMUTED and base.endswith(("q_proj", "k_proj")):
            heads = "num_attention_heads" if base.endswith("q_proj") else "num_key_value_heads"
            values = permute(values, config[heads])
        if config["model_type"] in GEMMA and base.endswith("norm"):
            values = values + 1
        # llama.cpp takes the head's size for the scale; what the config says goes into q.
        scaled = {"gemma2": "q_proj", "gemma3_text": "q_norm"}.get(config["model_type"])
        if scaled and base.endswith(scaled):
            values = values * (config["head_dim"] / config["query_pre_attn_scalar"]) ** 0.5
        name = gguf_name(base, config["model_type"])
        tensors[f"{name}.{suffix}"] = np.ascontiguousarray(values, np.float32)
    return metadata(config), {**tensors, **rope_tensors(config)}


def gguf_name(base: str, family: str) -> str:
    if base in NAMES:
        return NAMES[base]
    _, _, layer, part = base.split(".", 3)
    names = {**NAMES, **POST_NORMS} if family in ("gemma2", "gemma3_text", "olmo2") else NAMES
    return f"blk.{layer}.{names[part]}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Halves to pairs: convert_hf_to_gguf.py, LlamaModel.permute."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def architecture(config: dict[str, Any]) -> str:
    kind = config["model_type"]
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(kind, str(kind))


def head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_dim(config),
        "vocab_size": config["vocab_size"],
    }
    if config.get("head_dim"):
        keys["attention.key_length"] = keys["attention.value_length"] = config["head_dim"]
    if rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys["rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config["model_type"] == "granite":
        keys["attention.scale"] = config["attention_multiplier"]
        keys["embedding_scale"] = config["embedding_multiplier"]
        keys["residual_scale"] = config["residual_multiplier"]
        keys["logit_scale"] = config["logits_scaling"]
    if config["model_type"] == "phi3":
        keys["attention.sliding_window"] = config.get("sliding_window") or 0
        original = config["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
        if rope["rope_type"] == "longrope":
            scale = config["max_position_embeddings"] / original
            keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    if config["model_type"] in ("gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gemma2":
        keys["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        keys["final_logit_softcapping"] = config["final_logit_softcapping"]
    if config["model_type"] == "gemma3_text":  # read, if not written by the converter
        keys["rope.freq_base_swa"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    arch = architecture(config)
    vocabulary = {
        key: value
        for key, value in tiny_llama.settings(tiny_llama.Shape()).items()
        if key.startswith("tokenizer.")
    }
    return {**{f"{arch}.{key}": value for key, value in keys.items()}, **vocabulary}


def words(count: int) -> dict[str, Any]:
    """A vocabulary of that many words, for models whose vocabulary is another than tiny_llama's."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"w{i}w" for i in range(3, count))],
        "tokenizer.ggml.scores": [0.0] * count,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (count - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def rope_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if rope["rope_type"] != "llama3":
        return {}
    # LlamaModel.generate_extra_tensors
    dim, factors = head_dim(config), []
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for i in range(0, dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wave < high:
            factors.append(1.0)
        elif wave > low:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def as_family(arch: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A tiny Llama written as another architecture that computes the same."""
    shape = tiny_llama.Shape()
    keys = {
        key.replace("llama.", f"{arch}."): value
        for key, value in tiny_llama.settings(shape).items()
    }
    tensors = tiny_llama.random_tensors(shape, tied=True, seed=seed)
    if arch in ("qwen2", "phi3"):  # their rows are in halves, not in pairs
        for name, values in tensors.items():
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                heads = shape.heads if "attn_q" in name else shape.kv_heads
                split = values.reshape(heads, shape.head_dim // 2, 2, -1)
                tensors[name] = split.swapaxes(1, 2).reshape(values.shape)
    for i in range(shape.layers):
        blk = f"blk.{i}"
        if arch == "phi3":
            parts = [tensors.pop(f"{blk}.attn_{part}.weight") for part in "qkv"]
            tensors[f"{blk}.attn_qkv.weight"] = np.concatenate(parts)
            parts = [tensors.pop(f"{blk}.ffn_{part}.weight") for part in ("gate", "up")]
            tensors[f"{blk}.ffn_up.weight"] = np.concatenate(parts)
        if arch == "qwen2":
            for part in "qkv":
                rows = len(tensors[f"{blk}.attn_{part}.weight"])
                tensors[f"{blk}.attn_{part}.bias"] = np.zeros(rows, np.float32)
    if arch == "granite":
        keys |= {"granite.logit_scale": 0.5, "granite.attention.scale": 0.25}  # 16 ** -0.5
    return keys, tensors


def write(
    path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, np.ndarray], **options: Any
) -> Path:
    """A GGUF file; options are GGUFWriter's, of which split_max_tensors makes several files."""
    writer = gguf.GGUFWriter(path, arch, **options)
    for key, value in keys.items():
        tiny_llama.add_setting(writer, key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
