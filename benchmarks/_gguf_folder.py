"""A GGUF model as a Hugging Face folder, for peers that read nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import save_file

from ortolan.export.gguf_reader import GgufCheckpoint
from ortolan.export.tokenizer import tokenizer_files
from ortolan.graphs.formats import weight_shapes


def write_folder(gguf: Path, folder: Path) -> None:
    """Write a Llama in float32, every weight as the GGUF file's blocks say. Held whole in memory.

    Only plain rope: what else config.json would have to say is not written.
    """
    checkpoint = GgufCheckpoint(gguf)
    config = checkpoint.config
    assert (config.architecture, config.rope_kind) == ("llama", "default")
    weights = {
        name if name.endswith(".bias") else f"{name}.weight": checkpoint.read(name)
        .as_float32()
        .codes
        for name in weight_shapes(config)
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    texts = tokenizer_files(checkpoint.metadata)
    ids = json.loads(texts["generation_config.json"])
    tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
    ends = ids["eos_token_id"]
    end = ends[0] if isinstance(ends, list) else ends
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": ids.get("bos_token_id", end),
        "eos_token_id": end,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_context,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
    }
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[end]}
    texts["config.json"] = json.dumps(settings, indent=2).encode()
    texts["tokenizer_config.json"] = json.dumps(names).encode()
    for name, data in texts.items():
        (folder / name).write_bytes(data)
