"""Peak memory of exporting a checkpoint larger than what may be held.

Makes a synthetic bfloat16 checkpoint in Hugging Face form (--gigabytes; 6 for the claim), exports
it in a process of its own, and compares that process's largest resident size with the float32 size
of the checkpoint's largest tensor. Needs twice the checkpoint's size on disk, three times with
`--weights float32`.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _common import Check, Report, Series, ortolan_command, parser

BOUND_MB = 400.0
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 32000  # Mistral 7B's
TABLE = VOCAB * HIDDEN
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS + 3 * INNER * HIDDEN


def main() -> int:
    """Make, export, measure, report."""
    arguments = parser(__doc__, rounds=1)
    arguments.add_argument("--gigabytes", type=float, default=6.0, help="size of the checkpoint")
    arguments.add_argument("--folder", type=Path, help="where there is room for twice that")
    arguments.add_argument("--weights", default="source", help="as of `ortolan export`")
    args = arguments.parse_args()
    report = Report("peak memory of an export over its largest tensor in float32")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name) / "checkpoint"
        layers = max(1, round((args.gigabytes * 1e9 / 2 - 2 * TABLE) / LAYER))
        size = make_checkpoint(folder, layers)
        bundle_size = size * (2 if args.weights == "float32" else 1)
        if shutil.disk_usage(name).free < 1.1 * bundle_size:
            report.skipped = f"a bundle of {bundle_size / 1e9:.1f} GB has no room in {name}"
            return report.finish(args.as_json)
        command = ortolan_command(
            *("export", folder, Path(name) / "bundle"), *("--weights", args.weights, "--no-report")
        )
        began_s = time.perf_counter()
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began_s
        if done.returncode != 0:
            sys.exit(f"ortolan export exited with {done.returncode}: {done.stderr}")
    # The largest of all children: there was only the one.
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    largest_mb = TABLE * 4 / 1e6
    report.series += [
        Series("checkpoint", "MB", [size / 1e6]),
        Series("largest tensor in float32", "MB", [largest_mb]),
        Series("peak resident size", "MB", [peak_mb]),
        Series("export", "s", [seconds]),
    ]
    over = Check(
        "peak over the largest tensor", peak_mb - largest_mb, " MB", BOUND_MB, at_least=False
    )
    report.checks = [over]
    return report.finish(args.as_json)


def make_checkpoint(folder: Path, layers: int) -> int:
    """Weights of a Mistral of so many layers, written piece by piece; returns their bytes."""
    folder.mkdir()
    q, kv = HIDDEN, HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        for part, rows, columns in (
            ("self_attn.q_proj", q, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, q),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            shapes[f"{at}.{part}.weight"] = (rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (HIDDEN,)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # One megabyte of finite numbers, over and over: what they are makes no difference.
    noise = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    piece = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes() * 8
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, end, len(piece)):
            file.write(piece[: end - at])
    settings = {
        "model_type": "mistral",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 4096,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return 8 + len(text) + end


if __name__ == "__main__":
    sys.exit(main())
