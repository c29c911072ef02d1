"""`ortolan export`: a checkpoint becomes a bundle."""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ortolan.cli.accuracy_table import write_accuracy
from ortolan.cli.options import debug_option, json_option
from ortolan.cli.output import megabytes, write, write_json
from ortolan.cli.progress import Progress, progress_bar
from ortolan.errors import AccuracyError, MissingDependencyError, UsageError
from ortolan.export.precision import (
    BLOCK_SIZES,
    DEFAULT_BLOCK_SIZE,
    Quantization,
    WeightsChoice,
)
from ortolan.export.presets import DEFAULT_PRESET, PRESETS, PresetName, broken_promise

if TYPE_CHECKING:
    from ortolan.graphs.manifest import Manifest

_DETAILS = ("block_size", "symmetric", "lm_head", "embedding", "bits_per_weight")

_FORMATS = click.Choice(get_args(WeightsChoice))
_SHIPPED = "\0"  # --calibrate without a file; no file is called that


# The defaults in the texts are ExportOptions', which cannot be read here: its module needs
# packages of the extra `export`. A test compares.
@click.command(short_help="Make a bundle of a checkpoint.")
@click.argument("source")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--preset",
    type=click.Choice(get_args(PresetName)),
    help="; ".join(f"{name}: {preset.summary}" for name, preset in PRESETS.items())
    + ". Instead of all options of weights below.",
)
@click.option(
    "--quantize",
    "preset",
    flag_value=DEFAULT_PRESET,
    help=f"The same as --preset {DEFAULT_PRESET}.",
)
@click.option(
    "--any-accuracy", is_flag=True, help="Accept a bundle that loses more than its preset promises."
)
@click.option(
    "--weights",
    type=_FORMATS,
    help="source: the checkpoint's precision, exactly; float32: expanded; int8, int4: rounded; "
    "w8a8: rounded, and multiplied as integers; blocks: the source's, or int8 where it has none.  "
    "[default: source]",
)
@click.option("--prefill-weights", type=_FORMATS, help="What prompts are read with instead.")
@click.option("--decode-weights", type=_FORMATS, help="What answers are written with instead.")
@click.option(
    "--block-size",
    metavar="N",
    type=int,
    help=f"Rounded weights that share a scale: {', '.join(map(str, BLOCK_SIZES))}.  "
    f"[default: {DEFAULT_BLOCK_SIZE}]",
)
@click.option(
    "--symmetric/--asymmetric",
    default=None,
    help="Asymmetric blocks have an offset too: closer to the source, slower.  "
    "[default: symmetric]",
)
@click.option(
    "--calibrate",
    metavar="[TEXT]",
    is_flag=False,
    flag_value=_SHIPPED,
    help="Round for what the layers read on a text: a file of yours (--calibrate=FILE), or the one "
    "that is shipped. Takes minutes; far closer to the source. (w8a8: smoothed on it, no more.)",
)
@click.option(
    "--bits-per-weight",
    metavar="X",
    type=float,
    help="With --weights int4 --calibrate: an average to spend where it buys most, on blocks of "
    "several sizes and some int8; scales count, the embedding does not.",
)
@click.option("--lm-head", type=_FORMATS, help="The output head's own format.")
@click.option(
    "--embedding",
    type=_FORMATS,
    help="The embedding's own format; a table that the head shares has one for both.",
)
@click.option(
    "--max-context",
    metavar="N",
    type=click.IntRange(min=2),
    help="Most positions that the bundle can be used with.  [default: the checkpoint's]",
)
@click.option(
    "--attention",
    type=click.Choice(["gqa", "onnx"]),
    help="gqa: the fast form; onnx: operators of the ONNX standard only, slower.  [default: gqa]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="What the graphs compute in: float32 on CPUs, the others on graphics processors.  "
    "[default: float32]",
)
@click.option(
    "--kv",
    type=click.Choice(["float", "int8"]),
    help="float: keys and values are kept as they are computed; int8: rounded, with scales from "
    "a calibration text.  [default: float]",
)
@click.option(
    "--report/--no-report",
    default=True,
    help="Measure what quantized weights cost against float32.",
)
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@json_option
@debug_option
def export(
    source: str,
    bundle: Path,
    preset: PresetName | None,
    any_accuracy: bool,
    weights: str | None,
    prefill_weights: str | None,
    decode_weights: str | None,
    block_size: int | None,
    symmetric: bool | None,
    calibrate: str | None,
    bits_per_weight: float | None,
    lm_head: WeightsChoice | None,
    embedding: WeightsChoice | None,
    max_context: int | None,
    attention: str | None,
    dtype: str | None,
    kv: str | None,
    report: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the bundle of SOURCE: a .gguf file, a Hugging Face folder, or org/name on the Hub.

    A revision goes after the name: org/name@revision. The demo model is called smollm2.

    BUNDLE, a folder, appears when it is complete and not before. If its weights are quantized,
    an accuracy report is added to it at the end.
    """
    exporter = _exporter()
    from ortolan.graphs.manifest import DEFAULT_DTYPES

    own: dict[str, Any] = {
        "weights": weights,
        "prefill_weights": prefill_weights,
        "decode_weights": decode_weights,
    }
    if preset is not None:
        details = (block_size, symmetric, lm_head, embedding, bits_per_weight)
        _check_alone(preset, own | dict(zip(_DETAILS, details, strict=True)))
        own |= PRESETS[preset].options() | {"preset": preset}
    given: dict[str, Any] = {
        "max_context": max_context,
        "attention": attention,
        "dtype": dtype,
        "kv": kv,
        "force": force,
        "quantization": Quantization(
            block_size, symmetric, lm_head, embedding, calibrate is not None, bits_per_weight
        ),
        "calibration": None if calibrate in (None, _SHIPPED) else Path(calibrate),
        **own,
    }
    options = exporter.ExportOptions(**{k: v for k, v in given.items() if v is not None})
    began_s = time.perf_counter()
    with progress_bar() as progress:
        manifest = exporter.export_bundle(source, bundle, options, progress)
        if manifest.quantized or manifest.dtypes != DEFAULT_DTYPES:
            manifest = _with_report(source, bundle, manifest, report, progress)
    seconds = time.perf_counter() - began_s
    size = sum(entry.size for entry in manifest.files.values())
    if as_json:
        write_json(
            {
                "bundle": str(bundle),
                "source": manifest.source.name,
                "bytes": size,
                "seconds": seconds,
                "accuracy_reports": [dataclasses.asdict(r) for r in manifest.accuracy_reports],
                "no_report": manifest.no_report,
            }
        )
    else:
        write_accuracy(manifest)
        name = str(bundle)
        options_end = "-- " if name.startswith("-") else ""
        following = f'ortolan generate {options_end}{shlex.quote(name)} "..."'
        write(f"{bundle}: {megabytes(size)} in {seconds:.1f} s; next: {following}\n")
    broken = None if preset is None or any_accuracy else broken_promise(preset, manifest)
    if broken is not None:
        raise AccuracyError(
            f"{bundle}: {broken}; the bundle is complete: take --any-accuracy to accept it, or "
            "another preset to replace it (with --force)"
        )


def _check_alone(preset: str, details: dict[str, Any]) -> None:
    for name, value in details.items():
        if value is not None:
            option = "--asymmetric" if value is False else f"--{name.replace('_', '-')}"
            raise UsageError(
                f"--preset {preset} and {option} contradict each other: a preset says all about "
                "weights; leave one of the two out"
            )


def _with_report(
    source: str, bundle: Path, manifest: Manifest, wanted: bool, progress: Progress | None
) -> Manifest:
    """The manifest with a report or the reason why there is none, as it now is in the bundle."""
    from ortolan.cli.accuracy import measure, why_no_report
    from ortolan.graphs.manifest import DEFAULT_DTYPES

    reason = why_no_report(manifest) if wanted else "--no-report"
    if reason is None and manifest.dtypes.activations == "bfloat16":
        reason = "the CPU, on which it would be measured, has no kernels for bfloat16"
    if reason is not None:
        manifest = dataclasses.replace(manifest, no_report=reason)
    else:
        # Weights that are the source's own are compared with themselves at exact accuracy.
        rounds = manifest.rounded_from or manifest.dtypes != DEFAULT_DTYPES
        other = source if rounds else None
        found = measure(bundle, other, progress=progress)
        manifest = dataclasses.replace(manifest, accuracy_reports=found)
    manifest.write(bundle)
    return manifest


def _exporter() -> Any:
    """The module that exports, with an error that names the extra if a package is missing."""
    try:
        from ortolan.export import exporter
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "ortolan"):
            raise
        raise MissingDependencyError(package, "export", "exporting a checkpoint") from error
    return exporter
