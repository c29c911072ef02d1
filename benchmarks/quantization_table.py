"""What rounding weights costs, by method, bits and block size; the table of docs/quantization.md.

Weights alone: products are float32, so that nothing but rounding is seen. A bundle's own report
adds what its products cost. SOURCE's weights in float32 are the reference; layers run one after
another over the held-out texts, of which a report's first tokens are read, so no bundle is made.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from _common import Check, Report

from ortolan.cli.accuracy import TEXTS, Divergences
from ortolan.export.budget import Group, measured, spent
from ortolan.export.calibrated import CalibratedCheckpoint, Rounding
from ortolan.export.calibration import LayerRunner
from ortolan.export.calibration_text import calibration_text, calibration_windows
from ortolan.export.exporter import checkpoint_texts, open_checkpoint
from ortolan.export.sources import find_source
from ortolan.graphs.formats import (
    EMBEDDING,
    LAYERS,
    LM_HEAD,
    WeightFormat,
    layer_name,
    weight_shapes,
)
from ortolan.graphs.manifest import TextAccuracy

METHODS = {
    "nearest": Rounding(compensate=False, scale=False),
    "scaled": Rounding(compensate=False),
    "compensated": Rounding(scale=False, correction=0),
    "corrected": Rounding(scale=False),
    "all": Rounding(),
}


_JUDGED = 4  # the first of the rows


@dataclass(frozen=True)
class Case:
    """Layers in one format or, with a budget, several; the table too, or as the source has it."""

    method: str
    format: WeightFormat
    table: bool = False
    budget: float | None = None

    @property
    def name(self) -> str:
        stored = str(self.format) if self.budget is None else f"{self.budget:g} bits"
        return f"{stored}{', table too' if self.table else ''}: {self.method}"


def cases() -> list[Case]:
    """Every row of the table, the two of the claim first."""
    int4 = {size: WeightFormat("int4", size) for size in (32, 64, 128, 256)}
    found = [Case("nearest", int4[32]), Case("all", int4[128])]
    found += [Case("nearest", int4[32], True), Case("all", int4[128], True)]
    found += [
        Case(method, int4[128]) for method in ("nearest", "scaled", "compensated", "corrected")
    ]
    for size in (32, 64, 256):
        found += [Case(method, int4[size]) for method in ("nearest", "all")]
    for size in (64, 128):
        found += [Case(method, WeightFormat("int4", size, True)) for method in ("nearest", "all")]
    for size in (32, 128):
        found += [Case(method, WeightFormat("int8", size)) for method in ("nearest", "all")]
    found += [Case("all", int4[128], budget=budget) for budget in (4.5, 5.0, 6.0)]
    return list(dict.fromkeys(found))


class Bench:
    """One source, and its distributions on the held-out texts."""

    def __init__(self, source: str) -> None:
        self.checkpoint = open_checkpoint(find_source(source), None)
        self.config = self.checkpoint.config
        texts = checkpoint_texts(self.checkpoint)
        self.windows = calibration_windows(
            calibration_text(None),
            texts,
            self.config.max_context,
            self.config.vocab_size,
            "the calibration text",
        )
        tokenizer = tokenizers.Tokenizer.from_str(texts["tokenizer.json"].decode())
        self.texts = []
        for _, file, most in TEXTS:
            text = (resources.files("ortolan") / file).read_text(encoding="utf-8")
            self.texts.append(np.array([tokenizer.encode(text).ids[:most]]))
        self.runners = [LayerRunner(self.checkpoint, self.config, ids) for ids in self.texts]
        self.reference = list(self._logits(self.checkpoint))
        self._groups: list[Group] | None = None

    def run(self, case: Case) -> tuple[TextAccuracy, float, float]:
        """Its divergence, bits per weight of the layers, and the seconds that it took."""
        began_s = time.perf_counter()
        formats = self._formats(case)
        args = self.checkpoint, self.config, formats, self.windows, METHODS[case.method]
        found = Divergences()
        logits = self._logits(CalibratedCheckpoint(*args))
        for ids, reference, ours in zip(self.texts, self.reference, logits, strict=True):
            found.add(reference, ours, ids[0, 1:].tolist())
        return found.summary(case.name), self._bits(formats), time.perf_counter() - began_s

    def _formats(self, case: Case) -> dict[str, WeightFormat]:
        formats = dict(self.checkpoint.formats)
        for name, shape in weight_shapes(self.config).items():
            if len(shape) == 2 and (case.table or name.startswith(LAYERS)):
                formats[name] = case.format
        if case.budget is not None:
            if self._groups is None:
                args = self.checkpoint, self.config, formats, self.windows
                self._groups = measured(*args, affine=False)
            formats |= spent(self._groups, case.budget)
        return formats

    def _bits(self, formats: dict[str, WeightFormat]) -> float:
        bits = weights = 0.0
        for name, (outputs, *inputs) in weight_shapes(self.config).items():
            if inputs and name.startswith(LAYERS):
                size = outputs * inputs[0]
                group = Group(0, "mlp_in", (name,), inputs[0], size, {})
                bits, weights = bits + group.bits(formats[name]), weights + size
        return bits / weights

    def _logits(self, checkpoint: Any) -> Iterator[np.ndarray]:
        """[tokens - 1, vocab] of each text; a layer's weights are read once for all texts."""
        table = checkpoint.read(EMBEDDING).dequantized()
        hidden = [runner.embedded(table) for runner in self.runners]
        for layer in range(self.config.num_layers):
            prefix = layer_name(layer, "")
            weights = {
                name.removeprefix(prefix): checkpoint.read(name).dequantized()
                for name in weight_shapes(self.config)
                if name.startswith(prefix)
            }
            hidden = [
                runner.run(layer, weights, states)
                for runner, states in zip(self.runners, hidden, strict=True)
            ]
        head = table if self.config.tie_embeddings else checkpoint.read(LM_HEAD).dequantized()
        for runner, states in zip(self.runners, hidden, strict=True):
            logits = runner.head_inputs(states[0, :-1]) @ head.T / self.config.logits_divisor
            cap = self.config.logits_softcap
            yield np.tanh(logits / cap) * cap if cap else logits


def main() -> int:
    """Measure each case, print a table in Markdown, and judge the claim."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", nargs="?", default="smollm2", help="default: %(default)s")
    parser.add_argument("--claim", action="store_true", help="only the rows that are judged")
    parser.add_argument(
        "--rows", type=int, nargs="+", metavar="N", help="only these, counted from 1, in this order"
    )
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    if wrong := [row for row in args.rows or () if not 1 <= row <= len(cases())]:
        parser.error(f"--rows {wrong[0]}: there are rows 1 to {len(cases())}")
    report = Report(f"{Path(args.source).name}: int4 block 128 calibrated against block 32 nearest")
    bench, costs = Bench(args.source), {}
    if not args.as_json:
        print("| layers | method | bits per weight | mean KL | 99 % KL | top-1 | minutes |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
    chosen = cases()[: _JUDGED if args.claim else None]
    if args.rows:
        chosen = [cases()[row - 1] for row in args.rows]
    for case in chosen:
        found, bits, seconds = bench.run(case)
        costs[case] = found.mean_kl
        if not args.as_json:
            stored, method = case.name.split(": ")
            print(
                f"| {stored} | {method} | {bits:.2f} | {found.mean_kl:.4f} | {found.p99_kl:.3f} "
                f"| {found.top1_agreement:.3f} | {seconds / 60:.1f} |",
                flush=True,
            )
        report.checks.append(Check(case.name, found.mean_kl, " nats"))
    plain, fitted = WeightFormat("int4", 32), WeightFormat("int4", 128)
    for table in (False, True):
        judged = Case("all", fitted, table), Case("nearest", plain, table)
        if not costs.keys() >= {*judged}:
            continue
        ratio = costs[judged[0]] / costs[judged[1]]
        what = f"KL, calibrated 128 over nearest 32{', table too' if table else ''}"
        report.checks.append(Check(what, ratio, "x", 1.0, at_least=False))
    return report.finish(args.as_json)


if __name__ == "__main__":
    sys.exit(main())
