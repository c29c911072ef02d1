"""Makes tests/data/arch: tiny random checkpoints, and what transformers computes from them.

Not part of the suite, since it needs torch and transformers (made with 2.14 and 5.24). In an
environment that has them:

    python tests/make_arch_references.py [NAME ...]

Each folder has config.json, model.safetensors (float32) and expected.npz: input_ids [T], logits
[T, vocab] and 16 greedy_ids, as golden/arch has them. expected_long.npz, where there is one, is
for a text beyond the original context of longrope, which is another model there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).with_name("data") / "arch"
GREEDY = 16
VOCAB = 128

# Far from the published sizes: windows are shorter than the prompt, caps and scales so small that
# every one of them changes the logits.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
RAMP = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8]

MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", "num_hidden_layers": 2, **GEMMA},
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 6,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 0.8,
        **GEMMA,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        },
    },
    "olmo2": {"model_type": "olmo2", "num_hidden_layers": 2},
    "phi3_longrope": {
        "model_type": "phi3",
        "num_hidden_layers": 2,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": RAMP,
            "long_factor": [1.5 * factor * factor for factor in RAMP],
        },
    },
    "phi3_partial_rotary": {
        "model_type": "phi3",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "qwen2_yarn": {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama_yarn": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "beta_fast": 5.0,
            "beta_slow": 0.5,
            "truncate": False,
            "attention_factor": 1.2,
            "original_max_position_embeddings": 16,
        },
    },
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that every part matters; norms around their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            neutral = parameter.detach().round()  # 0 or 1, as the family has it; biases 0
            parameter.data = neutral + 0.25 * noise
        elif "embed_tokens" in name:
            # Gemma multiplies it; where it outweighs the layers, tied logits repeat the last token.
            parameter.data = (0.1 if model.config.tie_word_embeddings else 0.5) * noise
        else:
            parameter.data = 1.5 * noise / parameter.shape[-1] ** 0.5


@torch.no_grad()
def expected(model: torch.nn.Module, length: int, seed: int) -> dict[str, np.ndarray]:
    """Everything is computed anew for every token: there is no cache to get wrong."""
    ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))
    logits = model(ids, use_cache=False).logits[0]
    whole = ids
    for _ in range(GREEDY):
        last = model(whole, use_cache=False).logits[0, -1]
        whole = torch.cat([whole, last.argmax().reshape(1, 1)], dim=1)
    return {
        "input_ids": ids[0].numpy(),
        "logits": logits.float().numpy(),
        "greedy_ids": whole[0, length:].numpy(),
    }


def make(name: str, seed: int) -> None:
    """One folder."""
    folder = FOLDER / name
    settings = {**COMMON, **MODELS[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(fresh, seed)
    fresh.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Read again: what counts is how transformers understands the files.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    np.savez_compressed(folder / "expected.npz", **expected(model, 40, seed))
    if "original_max_position_embeddings" in settings:
        np.savez_compressed(folder / "expected_long.npz", **expected(model, 72, seed))


if __name__ == "__main__":
    for number, wanted in enumerate(MODELS):
        if wanted in (sys.argv[1:] or MODELS):
            make(wanted, number)
