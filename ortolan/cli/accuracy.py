"""What a bundle's precision costs: its next-token distributions against the source's in float32.

The reference is a bundle of the same source with its weights as they are, run at exact accuracy.
That equals the float32 graph (a test compares the two; on SmolLM2 they are 1.6e-11 nats apart),
and a quantized source takes a fifth of the disk and the memory that way. Everything that is
written for a report lies in a temporary folder beside the bundle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortolan.errors import EngineError, MissingDependencyError, UsageError
from ortolan.graphs.manifest import AccuracyReport, Manifest, TextAccuracy
from ortolan.optional import require
from ortolan.runtime.reference import FloatArray, kl_rows, log_softmax

if TYPE_CHECKING:
    from ortolan.runtime.llm import LLM

Progress = Callable[[str, int, int], None]

# Our own words, shipped for this alone: name, file, and the most tokens that are read of it.
TEXTS = (
    ("English", "heldout.txt", 512),
    ("code", "heldout_code.txt", 256),
    ("other scripts", "heldout_scripts.txt", 256),
)
REFERENCE = "the source's weights in float32"
_WINDOW = 512  # tokens that are read together
_LOGITS_BYTES = 64 << 20  # of one model's logits at a time
_ROWS = 16  # positions whose distributions are float64 at a time


@dataclass
class Divergences:
    """What was found at each position that predicts a token of a text."""

    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    reference_loss: list[float] = field(default_factory=list)

    def add(self, reference: FloatArray, ours: FloatArray, targets: Sequence[int]) -> None:
        """Logits [n, vocab] of both, and the tokens that followed."""
        for start in range(0, len(targets), _ROWS):
            part = slice(start, start + _ROWS)
            log_p, log_q = log_softmax(reference[part]), log_softmax(ours[part])
            index = np.arange(len(log_p)), np.asarray(targets[part])
            self.kl += kl_rows(log_p, log_q).tolist()
            self.same_top += (log_p.argmax(-1) == log_q.argmax(-1)).tolist()
            self.loss += (-log_q[index]).tolist()
            self.reference_loss += (-log_p[index]).tolist()

    def extend(self, other: Divergences) -> None:
        self.kl += other.kl
        self.same_top += other.same_top
        self.loss += other.loss
        self.reference_loss += other.reference_loss

    def summary(self, text: str) -> TextAccuracy:
        """Raises EngineError if a model computed numbers that are not finite."""
        if not np.isfinite([self.kl, self.loss, self.reference_loss]).all():
            raise EngineError(f"the logits after the text {text} are not finite")
        return TextAccuracy(
            text=text,
            tokens=len(self.kl),
            mean_kl=float(np.mean(self.kl)),
            p99_kl=float(np.percentile(self.kl, 99)),
            top1_agreement=float(np.mean(self.same_top)),
            perplexity=_perplexity(self.loss),
            reference_perplexity=_perplexity(self.reference_loss),
        )


def _perplexity(losses: list[float]) -> float:
    return math.exp(min(float(np.mean(losses)), 700))  # what is larger is no float


def why_no_report(manifest: Manifest) -> str | None:
    """Why this bundle's accuracy cannot be measured here, or None if it can."""
    if "tokenizer.json" not in manifest.files:
        return "the bundle has no tokenizer, so no text can be read"
    try:
        require("onnxruntime", "cpu", "measuring accuracy")
    except MissingDependencyError as error:
        return str(error)
    return None


def measure(
    bundle: Path,
    source: str | None,
    engine: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> list[AccuracyReport]:
    """The report of a bundle, run with these fields of EngineConfig, at default accuracy if none.

    Where its phases differ there are two, prefill's and decode's.

    source: the checkpoint that it was made of; None takes the bundle itself at exact accuracy,
    which is right where its weights are the source's own. Raises UsageError if the source is
    another one than the bundle's, and whatever exporting and running raise.
    """
    import ortolan
    from ortolan.export.publish import folder_beside

    with folder_beside(bundle) as folder:
        reference = bundle if source is None else _reference(source, bundle, folder, progress)
        settings = {
            **(engine or {}),
            "max_slots": 1,
            # What is packed for this purpose would fill the bundle's folder.
            "cache_dir": str(folder / "packed"),
            "max_context": min(_WINDOW, Manifest.read(bundle).model.max_context),
        }
        with (
            ortolan.load(bundle, **settings) as ours,
            ortolan.load(reference, **{**settings, "accuracy": "exact"}) as exact,
        ):
            phases = ("prefill", "decode") if ours.manifest.phases_differ else ("",)
            return [compare(ours, exact, progress, phase) for phase in phases]


def _reference(source: str, bundle: Path, folder: Path, progress: Progress | None) -> Path:
    from ortolan.export.exporter import ExportOptions, export_bundle

    manifest = Manifest.read(bundle)
    # The context is the bundle's: some rope scalings depend on it.
    options = ExportOptions(max_context=manifest.model.max_context)
    made = export_bundle(source, folder / "reference", options, progress)
    if made.source.sha256 != manifest.source.sha256:
        raise UsageError(
            f"{source} is not the checkpoint that {bundle} was made of, which is "
            f"{manifest.source.name} with SHA-256 {manifest.source.sha256[:16]}...; give that one"
        )
    return folder / "reference"


def compare(
    ours: LLM, reference: LLM, progress: Progress | None = None, phase: str = ""
) -> AccuracyReport:
    """The report of one loaded model against another with the same vocabulary.

    phase: "decode" feeds ours all tokens but the first two of a text one by one.
    """
    onnxruntime = require("onnxruntime", "cpu", "measuring accuracy")
    total, summaries = Divergences(), []
    for done, (name, file, most) in enumerate(TEXTS):
        if progress is not None:
            what = f"accuracy of {phase} on" if phase else "accuracy on"
            progress(f"{what} {name}", done, len(TEXTS))
        found = Divergences()
        text = (resources.files("ortolan") / file).read_text(encoding="utf-8")
        ids = reference.encode(text)[:most]
        for window in _windows(ids, ours):
            _compare_window(ours, reference, window, found, 2 if phase == "decode" else None)
        summaries.append(found.summary(name))
        total.extend(found)
    return AccuracyReport(
        accuracy=ours.config.accuracy,
        reference=REFERENCE,
        runtime=f"onnxruntime {onnxruntime.__version__}, {ours.config.provider}",
        total=total.summary("all"),
        texts=summaries,
        phase=phase,
    )


def _windows(ids: list[int], llm: LLM) -> list[list[int]]:
    """Pieces that fit into the context; the last token of each is only predicted."""
    size = min(_WINDOW, llm.config.max_context or llm.manifest.model.max_context)
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [piece for piece in pieces if len(piece) > 1]


def _compare_window(
    ours: LLM, reference: LLM, ids: list[int], found: Divergences, decoded_from: int | None
) -> None:
    rows = max(1, _LOGITS_BYTES // (4 * ours.manifest.model.vocab_size))
    for start in range(0, len(ids) - 1, rows):
        positions = range(start, min(start + rows, len(ids) - 1))
        # All of the window is read each time: how it is cut must not depend on what is wanted.
        found.add(
            reference.logits(ids, positions),
            ours.logits(ids, positions, decoded_from),
            [ids[position + 1] for position in positions],
        )
