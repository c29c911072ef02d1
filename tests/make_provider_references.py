"""python make_provider_references.py FOLDER SMOLLM2: bundles, and what the CPU says of each.

Needs what exports. FOLDER gets a bundle for each checkpoint, and beside it NAME.json with the
answers to every scenario and NAME.npz with logits. SMOLLM2: a bundle of the demo model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import tiny_hf
from provider_scenarios import SCENARIOS, SETTINGS, ask, logits_of
from tiny_llama import Shape, write_tiny_gguf

from ortolan.export.exporter import ExportOptions, export_bundle
from ortolan.graphs.contract import FloatDtype
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig

QUANTIZED = {"token_embd*": "Q8_0"}
# Weights, heads, embedding; then what families have of their own: windows, norms of q and k.
CHECKPOINTS: Mapping[str, Callable[[Path], Path]] = {
    "float32": lambda at: write_tiny_gguf(at / "model.gguf"),
    "float16": lambda at: write_tiny_gguf(at / "model.gguf"),  # and computed so
    "q4_1": lambda at: write_tiny_gguf(at / "model.gguf", types={"*": "Q4_1", **QUANTIZED}),
    "q4_0": lambda at: write_tiny_gguf(at / "model.gguf", types={"*": "Q4_0", **QUANTIZED}),
    "many-heads": lambda at: write_tiny_gguf(
        at / "model.gguf", types="Q8_0", shape=Shape(heads=12, kv_heads=3)
    ),
    "untied": lambda at: write_tiny_gguf(at / "model.gguf", types="Q4_0", tied=False),
    "window": lambda at: hugging_face(at, "mistral", sliding_window=5),
    "qk-norm": lambda at: hugging_face(at, "qwen3"),
}


def hugging_face(at: Path, family: str, **changes: object) -> Path:
    """A tiny checkpoint of that family, with a tokenizer."""
    texts = {"tokenizer.json": tiny_hf.tokenizer_json()}
    return tiny_hf.write_folder(at / "model", tiny_hf.config(family, **changes), texts=texts)


def main() -> None:
    """See the top of the file."""
    folder, smollm2 = (Path(argument) for argument in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in CHECKPOINTS.items():
        with tempfile.TemporaryDirectory() as temporary:
            source = make(Path(temporary))
            dtype: FloatDtype = "float16" if name == "float16" else "float32"
            export_bundle(str(source), folder / name, ExportOptions(force=True, dtype=dtype))
        write_references(folder / name, folder / name)
    write_references(smollm2, folder / "smollm2")  # beside a link to it
    linked = folder / "smollm2"
    linked.unlink(missing_ok=True)
    linked.symlink_to(smollm2.resolve())


def write_references(path: Path, target: Path) -> None:
    """NAME.json and NAME.npz beside `target`."""
    answers = {}
    with LLM(Bundle.open(path), EngineConfig(**SETTINGS)) as llm:
        for name in (name for name, scenario in SCENARIOS.items() if not scenario.settings):
            answers[name] = ask(llm, SCENARIOS[name])
        np.savez(target.with_name(f"{target.name}.npz"), **logits_of(llm))
    for name in SCENARIOS.keys() - answers.keys():
        config = EngineConfig(**{**SETTINGS, **SCENARIOS[name].settings})
        with LLM(Bundle.open(path), config) as llm:
            answers[name] = ask(llm, SCENARIOS[name])
    text = json.dumps(answers, indent=1)
    target.with_name(f"{target.name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
