"""`ortolan providers`: what can be run on here, and where a bundle's nodes land."""

from __future__ import annotations

import dataclasses
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortolan.cli.options import (
    PROVIDER,
    debug_option,
    engine_options,
    json_option,
)
from ortolan.cli.output import note, one_line, visible, write, write_json, write_table
from ortolan.errors import UsageError

if TYPE_CHECKING:
    from ortolan.runtime.providers.placement import Placed
    from ortolan.runtime.providers.survey import Survey


@click.command(short_help="Show what can be run on here, and what is missing.")
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@engine_options(*PROVIDER, "threads", "accuracy")
@json_option
@debug_option
@click.pass_context
def providers(
    ctx: click.Context, bundle: Path | None, engine: dict[str, Any], as_json: bool
) -> None:
    """Show which execution providers work here, and the command that would add the others.

    Each is tried by a product that it has to compute. With --provider only that one is looked at,
    and the exit status is 1 if it does not work.

    With BUNDLE: which nodes of its graphs land on the provider and which on the CPU; with --strict
    the exit status is 1 if compute does.
    """
    if bundle is not None:
        _show_placement(bundle, engine, as_json)
        return
    given = ctx.get_parameter_source("provider") is not click.core.ParameterSource.DEFAULT
    if not given and engine["provider_options"]:
        raise UsageError("--provider-option needs --provider here; say whose option it is")
    _show_survey(engine["provider"] if given else None, engine["provider_options"], as_json)


def _show_survey(only: str | None, options: dict[str, Any], as_json: bool) -> None:
    from ortolan.errors import ProviderError
    from ortolan.runtime.providers.survey import survey

    found = survey(only, options)
    if as_json:
        write_json(
            {
                "python": platform.python_version(),
                "platform": sys.platform,
                **dataclasses.asdict(found),
            }
        )
    else:
        _print_survey(found)
    if only is not None and found.providers[0].state != "usable":
        one = found.providers[0]
        command = f"; {one.command}" if one.command else ""
        raise ProviderError(f"provider {only} does not work here: {one_line(one.reason)}{command}")


def _print_survey(found: Survey) -> None:
    write_table(
        ("installed", "version", "folder"),
        [(one.name, one.version, one.folder) for one in found.installed]
        or [("no onnxruntime", "", "")],
    )
    write_table(
        ("provider", "here", "devices", "what is missing"),
        [
            (one.name, one.state, "; ".join(one.devices), one_line(one.reason))
            for one in found.providers
        ],
    )
    commands = [(one.name, one.command) for one in found.providers if one.command]
    if commands:
        write_table(("to add", "run in Ortolan's clone"), commands)
    for problem in found.problems:
        note(f"warning: {one_line(problem)}")


def _show_placement(bundle: Path, engine: dict[str, Any], as_json: bool) -> None:
    from ortolan.errors import ProviderError
    from ortolan.optional import require

    require("onnxruntime", "cpu", "loading a bundle's graphs")
    from ortolan.runtime.engine.placement import graph_placements
    from ortolan.runtime.params import EngineConfig
    from ortolan.runtime.providers.placement import left_to_cpu

    config = EngineConfig(**engine)
    ort_name, placements = graph_placements(bundle, config)
    fallen = {graph: left_to_cpu(placed, ort_name) for graph, placed in placements.items()}
    if as_json:
        write_json(
            {
                "provider": engine["provider"],
                "graphs": {
                    graph: [dataclasses.asdict(one) for one in placed]
                    for graph, placed in placements.items()
                },
                "left_to_cpu": fallen,
            }
        )
    else:
        for graph, placed in placements.items():
            _print_placed(graph, placed)
    total = sum(sum(found.values()) for found in fallen.values())
    if total and config.strict:
        graphs = ", ".join(graph for graph, found in fallen.items() if found)
        raise ProviderError(
            f"{bundle}: {engine['provider']} leaves {total} compute nodes to the CPU, in {graphs}"
        )
    if not as_json and ort_name != "CPUExecutionProvider":
        write(f"{visible(engine['provider'])} leaves {total or 'no'} compute nodes to the CPU\n")


def _print_placed(graph: str, placed: tuple[Placed, ...]) -> None:
    rows = []
    for one in placed:
        for kind, compute in (("compute", True), ("shapes", False)):
            operators = one.operators(compute=compute)
            if operators:
                shown = ", ".join(f"{op} {count}" for op, count in operators.items())
                rows.append((one.provider, kind, str(sum(operators.values())), shown))
    write_table((f"{graph} on", "work", "nodes", "operators"), rows, numbers=(2,))
