"""`ortolan verify`: whether a bundle is as it was written, and computes what it should."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortolan.cli.accuracy_table import write_report
from ortolan.cli.options import (
    PROVIDER,
    bundle_argument,
    debug_option,
    engine_options,
    json_option,
)
from ortolan.cli.output import visible, write, write_json, write_table
from ortolan.errors import BundleError, UsageError

if TYPE_CHECKING:
    from ortolan.cli.golden import CaseResult
    from ortolan.graphs.manifest import AccuracyReport, Manifest
    from ortolan.runtime.reference import Outcome


@click.command(short_help="Check a bundle's files and results.")
@bundle_argument
@click.option(
    "--golden",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Compare with the reference results in this file.",
)
@click.option(
    "--source",
    metavar="SOURCE",
    help="Compare with this checkpoint's weights in float32, and with the stored report.",
)
@engine_options(*PROVIDER, "threads", "cache_dir", "accuracy")
@json_option
@debug_option
def verify(
    bundle: Path, golden: Path | None, source: str | None, engine: dict[str, Any], as_json: bool
) -> None:
    """Check every file of BUNDLE against its manifest, and its results against a reference.

    Without --golden, another provider than cpu is compared with what cpu gives at exact accuracy.

    Exit status 1 if a file is damaged, a case fails, or the mean KL from SOURCE in float32 is far
    above the manifest's. A greedy token is owed while the reference's best logit leads by more
    than twice the error measured on the case's last logits.
    """
    from ortolan.graphs.manifest import Manifest

    manifest = Manifest.read(bundle)
    damage = damaged_files(bundle, manifest)
    report: dict[str, Any] = {"files": len(manifest.files), "damage": damage}
    if not as_json:
        for sentence in damage:
            write(f"{visible(sentence)}\n")
        if not damage:
            write(f"{len(manifest.files)} files have the sizes and hashes of manifest.json\n")
    # A damaged bundle is not run: its results would only repeat what is known.
    results: list[CaseResult] = []
    if golden is not None and not damage:
        reference, results = _compare(bundle, golden, engine)
        if as_json:
            report["golden"] = {
                "reference": reference,
                "accuracy": engine["accuracy"],
                "cases": [dataclasses.asdict(result) for result in results],
            }
        else:
            _print_results(reference, engine["accuracy"], results)
    outcomes: list[Outcome] = []
    if golden is None and engine["provider"] != "cpu" and not damage:
        outcomes = _compare_with_cpu(bundle, engine)
        if as_json:
            report["cpu"] = [dataclasses.asdict(outcome) for outcome in outcomes]
        else:
            _print_outcomes(engine, outcomes)
    failed = [result.name for result in results if result.failures]
    failed += [outcome.name for outcome in outcomes if outcome.failures]
    worse = None
    if source is not None and not damage:
        found = _measure(bundle, manifest, source, engine)
        worse = next(filter(None, (worse_than_stored(one, manifest) for one in found)), None)
        if as_json:
            report["accuracy_reports"] = [dataclasses.asdict(one) for one in found]
        else:
            for one in found:
                write_report(one)
    report["ok"] = not damage and not failed and worse is None
    if as_json:
        write_json(report)
    if damage:
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        raise BundleError(f"{damage[0]}{more}; export the bundle again")
    if failed:
        count = len(results) + len(outcomes)
        raise BundleError(
            f"{bundle}: {len(failed)} of {count} cases differ from the reference: "
            f"{', '.join(failed)}"
        )
    if worse is not None:
        raise BundleError(f"{bundle}: {worse}")


def damaged_files(bundle: Path, manifest: Manifest) -> list[str]:
    """A sentence for each file that is missing or not what manifest.json says."""
    from ortolan.cli.summary import is_plain_name
    from ortolan.graphs.manifest import file_entry

    damage = []
    for name, expected in manifest.files.items():
        if not is_plain_name(name):
            damage.append(f"{bundle}: manifest.json lists {name!r}, which is no plain file name")
            continue
        path = bundle / name
        try:
            if not path.is_file() and path.exists():
                damage.append(f"{path}: is no regular file")
                continue
            found = file_entry(path)
        except FileNotFoundError:
            damage.append(f"{path}: missing")
            continue
        except OSError as error:
            damage.append(f"{path}: cannot be read ({error.strerror})")
            continue
        if found.size != expected.size:
            damage.append(f"{path}: has {found.size:,} bytes, manifest.json says {expected.size:,}")
        elif found.sha256 != expected.sha256:
            damage.append(
                f"{path}: SHA-256 is {found.sha256}, manifest.json says {expected.sha256}"
            )
    return damage


def _measure(
    bundle: Path, manifest: Manifest, source: str, engine: dict[str, Any]
) -> list[AccuracyReport]:
    from ortolan.cli.accuracy import measure, why_no_report

    if (reason := why_no_report(manifest)) is not None:
        raise UsageError(f"--source cannot be compared with: {reason}")
    return measure(bundle, source, engine)


def worse_than_stored(found: AccuracyReport, manifest: Manifest) -> str | None:
    """A sentence if the mean KL is far above the stored report's, measured in the same way.

    Processors round int8 products in ways of their own, so some difference is rightly there.
    """
    for stored in manifest.accuracy_reports:
        limit = 2 * stored.total.mean_kl + 1e-3
        # Written so that NaN fails.
        alike = (stored.accuracy, stored.phase) == (found.accuracy, found.phase)
        if alike and not found.total.mean_kl <= limit:
            return (
                f"mean KL is {found.total.mean_kl:.2g}, manifest.json says "
                f"{stored.total.mean_kl:.2g}; export the bundle again"
            )
    return None


def _compare(bundle: Path, golden: Path, engine: dict[str, Any]) -> tuple[str, list[CaseResult]]:
    import ortolan
    from ortolan.cli.golden import check_case, check_vocabulary, read_golden
    from ortolan.runtime.reference import LIMITS

    reference, cases = read_golden(golden)
    with ortolan.load(bundle, **engine) as llm:
        check_vocabulary(golden, cases, llm.manifest.model.vocab_size)
        return reference, [check_case(llm, case, LIMITS[engine["accuracy"]]) for case in cases]


def _compare_with_cpu(bundle: Path, engine: dict[str, Any]) -> list[Outcome]:
    from ortolan.runtime.bundle import Bundle
    from ortolan.runtime.engine.opening import open_engine
    from ortolan.runtime.params import EngineConfig
    from ortolan.runtime.reference import LIMITS, compare, expected_by_cpu
    from ortolan.runtime.text.no_tokenizer import open_tokenizer

    opened, config = Bundle.open(bundle), EngineConfig(**engine)
    tokenizer = open_tokenizer(opened)
    cases = expected_by_cpu(opened, config, tokenizer)
    return compare(open_engine(opened, config, tokenizer), cases, LIMITS[config.accuracy])


def _print_outcomes(engine: dict[str, Any], outcomes: list[Outcome]) -> None:
    write(f"provider {engine['provider']} against cpu, accuracy exact\n")
    write_table(
        ("case", "max error", "KL", "greedy", "status"),
        [
            (
                one.name,
                f"{one.max_abs_error:.2e}",
                f"{one.kl:.2e}",
                f"{one.greedy_equal}/{one.greedy_owed} owed",
                "; ".join(one.failures) or "ok",
            )
            for one in outcomes
        ],
        numbers=(1, 2),
    )


def _print_results(reference: str, accuracy: str, results: list[CaseResult]) -> None:
    from ortolan.runtime.reference import LIMITS

    limits = LIMITS[accuracy]
    allowed = [
        f"{name} at most {limit:g}"
        for name, limit in (("error", limits.max_abs_error), ("KL", limits.kl))
        if limit is not None
    ]
    write(f"reference: {reference}\naccuracy {accuracy}: {', '.join(allowed)}, owed tokens equal\n")
    write_table(
        ("case", "prompt ids", "max error", "KL", "top-1", "greedy", "status"),
        [
            (
                result.name,
                _sign(result.prompt_equal),
                f"{result.max_abs_error:.2e}",
                "" if result.kl is None else f"{result.kl:.2e}",
                _sign(result.top1_equal),
                f"{result.greedy_equal}/{result.greedy_owed} owed of {result.greedy_stated}",
                "; ".join(result.failures) or "ok",
            )
            for result in results
        ],
        numbers=(2, 3),
    )


def _sign(equal: bool) -> str:
    return "equal" if equal else "differ"
