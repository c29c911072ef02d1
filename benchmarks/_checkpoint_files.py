"""Random checkpoints as files: a Hugging Face folder, or GGUF, written piece by piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any, cast

import gguf
import numpy as np
from _random_llama import FloatArray, Shape, Tensor, bfloat16, tensors
from gguf import GGMLQuantizationType as GgmlType
from tokenizers import pre_tokenizers

from ortolan.export.families import FAMILIES, model_config
from ortolan.export.settings import Settings
from ortolan.export.tokenizer import tokenizer_files

GGUF_TYPES = {
    "gguf-q4_0": GgmlType.Q4_0,
    "gguf-q8_0": GgmlType.Q8_0,
    "gguf-bf16": GgmlType.BF16,  # for llama-quantize to make others of
}
_FILE_TYPES = {
    GgmlType.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    GgmlType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    GgmlType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_CONTROL = ("<|begin_of_text|>", "<|end_of_text|>")
_MERGES = ("Ġ t", "h e")  # llama.cpp wants some


def write_folder(folder: Path, shape: Shape, seed: int) -> int:
    """A Hugging Face folder in bfloat16; returns the bytes of its weights file."""
    folder.mkdir(parents=True)
    texts = tokenizer_files(_vocabulary(shape.vocab))
    settings = {"bos_token": _CONTROL[0], "eos_token": _CONTROL[1]}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    texts["tokenizer_config.json"] = json.dumps(settings).encode()
    texts["config.json"] = json.dumps(shape.config_json(), indent=2).encode()
    for name, data in texts.items():
        (folder / name).write_bytes(data)
    header: dict[str, Any] = {}
    end = 0
    for tensor in tensors(shape, seed):
        begin, end = end, end + 2 * tensor.size
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors(shape, seed):
            for piece in tensor.pieces():
                bfloat16(piece).tofile(file)
    return 8 + len(text) + end


def write_gguf(path: Path, shape: Shape, kind: GgmlType, seed: int) -> int:
    """A GGUF file whose matrices, tables included, are all of one type; returns its bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    _add_settings(writer, shape, kind)
    # Written as they are made: the writer would keep all of them.
    parts = [_Pieces(tensor, kind) for tensor in tensors(shape, seed)]
    for part in parts:
        name, size = _gguf_name(part.tensor.name), part.nbytes
        writer.add_tensor_info(name, part.tensor.shape, np.dtype(np.float32), size, part.kind)
    factors = _rope_divisors(shape)
    if factors is not None:
        writer.add_tensor_info(
            "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes, GgmlType.F32
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in (*parts, factors):
        if data is not None:
            writer.write_tensor_data(cast(Any, data))  # asks no more of it than _Pieces has
    writer.close()
    return path.stat().st_size


class _Pieces:
    """What GGUFWriter asks of an array, for a tensor that is never whole in memory."""

    def __init__(self, tensor: Tensor, kind: GgmlType) -> None:
        self.tensor = tensor
        self.kind = kind if len(tensor.shape) == 2 else GgmlType.F32
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        self.nbytes = tensor.size // block * size

    def tofile(self, file: IO[bytes]) -> None:
        head = self.tensor.shape[0] // self.tensor.heads if self.tensor.heads else 0
        for piece in self.tensor.pieces():
            values = _paired(piece, head) if head else piece
            gguf.quants.quantize(values, self.kind).tofile(file)


def _paired(rows: FloatArray, head_dim: int) -> FloatArray:
    """Rows of whole heads, from halves to neighbouring pairs, which is how llama.cpp turns them.

    Source: llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in _GGUF_NAMES:
        return f"{_GGUF_NAMES[base]}.weight"
    layer, part = base.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def _rope_divisors(shape: Shape) -> FloatArray | None:
    """Llama 3's factors, which GGUF holds as a tensor."""
    settings = Settings("config.json", shape.config_json(), "")
    divisors = model_config(FAMILIES[shape.family], settings, None).rope_divisors
    return None if divisors is None else np.array(divisors, np.float32)


def _add_settings(writer: gguf.GGUFWriter, shape: Shape, kind: GgmlType) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope["rope_theta"])
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(_FILE_TYPES[kind])
    for key, value in _vocabulary(shape.vocab).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)


def _vocabulary(size: int) -> dict[str, Any]:
    """GGUF's description of a tokenizer with `size` tokens: bytes, two words, and fillers."""
    tokens = [*_CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in _MERGES]
    tokens += [f"filler{i}" for i in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(_CONTROL) + [1] * (size - len(_CONTROL)),
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
