"""`ortolan verify`: whether a bundle is as it was written, and computes what it should."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortolan.cli.options import bundle_argument, debug_option, engine_options, json_option
from ortolan.cli.output import visible, write, write_json, write_table
from ortolan.errors import BundleError

if TYPE_CHECKING:
    from ortolan.cli.golden import CaseResult
    from ortolan.graphs.manifest import Manifest


@click.command(short_help="Check a bundle's files and results.")
@bundle_argument
@click.option(
    "--golden",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Compare with the reference results in this file.",
)
@engine_options("provider", "threads", "cache_dir", "accuracy")
@json_option
@debug_option
def verify(bundle: Path, golden: Path | None, engine: dict[str, Any], as_json: bool) -> None:
    """Check every file of BUNDLE against its manifest, and its results against a reference.

    Exit status 1 if a file is damaged or a case fails. A greedy token is owed while the
    reference's best logit leads by more than twice the error measured on the case's last logits.
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
    failed = [result.name for result in results if result.failures]
    report["ok"] = not damage and not failed
    if as_json:
        write_json(report)
    if damage:
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        raise BundleError(f"{damage[0]}{more}; export the bundle again")
    if failed:
        raise BundleError(
            f"{bundle}: {len(failed)} of {len(results)} cases differ from the reference: "
            f"{', '.join(failed)}"
        )


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


def _compare(bundle: Path, golden: Path, engine: dict[str, Any]) -> tuple[str, list[CaseResult]]:
    import ortolan
    from ortolan.cli.golden import LIMITS, check_case, check_vocabulary, read_golden

    reference, cases = read_golden(golden)
    with ortolan.load(bundle, **engine) as llm:
        check_vocabulary(golden, cases, llm.manifest.model.vocab_size)
        return reference, [check_case(llm, case, LIMITS[engine["accuracy"]]) for case in cases]


def _print_results(reference: str, accuracy: str, results: list[CaseResult]) -> None:
    from ortolan.cli.golden import LIMITS

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
