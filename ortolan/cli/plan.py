"""`ortolan plan`: how much memory a bundle takes, before it is loaded."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortolan.cli.options import (
    MAX_THREADS,
    bundle_argument,
    debug_option,
    default_of,
    engine_options,
    json_option,
)
from ortolan.cli.output import complain, one_line, write, write_json, write_table
from ortolan.errors import UsageError
from ortolan.runtime.params import EngineConfig

if TYPE_CHECKING:
    from ortolan.runtime.bundle import Bundle
    from ortolan.runtime.memory import Memory
    from ortolan.runtime.plan import Plan
    from ortolan.runtime.providers import Provider

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# What a server holds beside the engine.
_SERVING = tuple(f"ortolan.runtime.serve.{name}" for name in ("grpc_server", "http_app"))


class _Size(click.ParamType[int]):
    """Bytes: a number with a unit of 1000 (GB) or 1024 (GiB)."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(value.strip())
        if found is None or (found[3] and not found[2]):
            self.fail(f"{value!r} is no size; give one such as 8GiB or 500MB", param, ctx)
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])
        if size < 1:
            self.fail("it must be at least a byte", param, ctx)
        return size


@click.command(short_help="Say how much memory a bundle takes.")
@bundle_argument
@click.option(
    "--slots",
    "--max-slots",
    "slots",
    metavar="N",
    type=click.IntRange(min=1),
    default=default_of(EngineConfig, "max_slots"),
    show_default=True,
    help="Answers that are generated at once.",
)
@click.option(
    "--context",
    "--max-context",
    "context",
    metavar="N",
    type=click.IntRange(min=2),
    default=default_of(EngineConfig, "max_context"),
    help="Most tokens of prompt and answer together.  [default: the bundle's]",
)
@click.option(
    "--replicas",
    metavar="N",
    type=click.IntRange(1, MAX_THREADS),
    default=1,
    show_default=True,
    help="Engines of one server, each with its own slots and caches.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    type=_Size(),
    help="What there is, such as 8GiB: of the host, or of the provider's device.  [default: what "
    "this machine or container has]",
)
@engine_options(
    "provider", "threads", "cache_dir", "accuracy", "kv_tokens", "prefix_cache_mb", "prefill_chunk"
)
@json_option
@debug_option
def plan(
    bundle: Path,
    slots: int,
    context: int | None,
    replicas: int,
    memory: int | None,
    engine: dict[str, Any],
    as_json: bool,
) -> None:
    """Show what BUNDLE takes of disk and memory, and how much KV fits beside it.

    `ortolan serve` and all that loads a bundle decide by the same figures what they may hold.
    """
    from ortolan.optional import require

    require("onnxruntime", "cpu", "planning for a model")
    from ortolan.runtime.bundle import Bundle
    from ortolan.runtime.engine.opening import check_sharing
    from ortolan.runtime.engine.packed import is_packed
    from ortolan.runtime.memory import process_bytes
    from ortolan.runtime.plan import plan_memory

    config = EngineConfig(**engine, max_slots=slots, max_context=context)
    opened = Bundle.open(bundle)
    provider = _provider(config)
    check_sharing(provider, replicas)
    process = _hold_what_a_server_holds(opened)
    try:
        found = plan_memory(
            opened.manifest,
            config,
            provider,
            _memory(memory, provider),
            process_bytes(),
            replicas=replicas,
        )
    except UsageError as error:
        raise UsageError(str(error).replace("max_context", "--context", 1)) from error
    del process
    packed = is_packed(opened, provider, config.accuracy, config.cache_dir)
    warnings = _warnings(found, packed)
    if as_json:
        write_json({**_as_json(found), "is_packed": packed, "warnings": warnings})
        return
    _print(found, packed)
    if memory is not None:
        write(f"{_command(bundle, found, config)}\n")
    for warning in warnings:
        complain(f"warning: {one_line(warning)}")


def _provider(config: EngineConfig) -> Provider:
    """The provider, whether it can run here or not; a plug-in library has to be loaded."""
    import onnxruntime as ort

    from ortolan.runtime.providers import configured_provider, load_provider
    from ortolan.runtime.providers.plugin import is_library

    if is_library(config.provider):
        return configured_provider(config, ort)
    return load_provider(config.provider)


def _memory(given: int | None, provider: Provider) -> Memory | None:
    from ortolan.runtime.memory import Memory, memory_found

    if given is not None:
        return Memory(given, "given")
    return memory_found() if provider.on_host else None


def _hold_what_a_server_holds(bundle: Bundle) -> object:
    """Load libraries and tokenizer, so that this process is as large as a server without a model.

    Returns what is to be kept until it has been measured.
    """
    import numpy as np

    import ortolan.runtime.engine.opening as opening
    from ortolan.runtime.text.no_tokenizer import open_tokenizer

    for name in _SERVING:
        with suppress(ImportError):  # this install does not serve
            importlib.import_module(name)
    return np, opening, open_tokenizer(bundle)


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        **dataclasses.asdict(plan),
        "total": plan.total,
        "fits": not plan.is_too_large,
        "slots_that_fit": plan.slots_that_fit,
        "tokens_that_fit": plan.tokens_that_fit,
    }


def size_text(count: int) -> str:
    """Bytes in the units that memory comes in."""
    return f"{count / 2**20:,.0f} MiB" if count < 10 * 2**30 else f"{count / 2**30:,.1f} GiB"


def _print(plan: Plan, packed: bool) -> None:
    rows: list[tuple[str, ...]] = [
        (part.name, size_text(part.bytes), part.place, part.what) for part in plan.parts
    ]
    each = f" in each of {plan.replicas} replicas" if plan.replicas > 1 else ""
    full = f"when {plan.slots} slots of {plan.context:,} tokens{each} and the caches are full"
    rows.append(("total", size_text(plan.total), "", full))
    write_table(("memory", "size", "where", ""), rows, numbers=(1,))
    files = [(part.name, size_text(part.bytes), part.what) for part in plan.disk]
    write_table(("disk", "size", ""), files, numbers=(1,))
    peak = "done" if packed else f"at most {size_text(plan.first_load)}"
    have = [("a token's KV", f"{plan.token_bytes / 1024:g} KiB"), ("first load", peak)]
    if plan.memory is not None:
        fit = f"{plan.tokens_that_fit:,} tokens: {plan.slots_that_fit:,} slots of {plan.context:,}"
        have = [("memory there is", _memory_text(plan.memory)), *have, ("KV that fits", fit + each)]
    have.append(("KV that is held", f"at most {plan.kv_tokens:,} tokens{each}"))
    write_table(None, have)


def _memory_text(memory: Memory) -> str:
    said = {
        "given": "as given",
        "container": "free in this container",
        "machine": "free in this machine, of which a part is left to others",
    }
    return f"{size_text(memory.bytes)}, {said[memory.source]}"


def _command(bundle: Path, plan: Plan, config: EngineConfig) -> str:
    """The command that serves with what was planned, wherever it runs."""
    words = ["ortolan", "serve", str(bundle)]
    settings: dict[str, Any] = {
        "--max-slots": plan.slots,
        "--max-context": plan.context,
        "--kv-tokens": plan.kv_tokens,
        "--prefix-cache-mb": plan.prefix_bytes // 2**20,
    }
    if plan.replicas > 1:
        settings["--replicas"] = plan.replicas
    for name in ("provider", "threads", "cache_dir", "accuracy", "prefill_chunk"):
        if (value := getattr(config, name)) != default_of(EngineConfig, name):
            settings[f"--{name.replace('_', '-')}"] = value
    for name, value in settings.items():
        words += [name, str(value)]
    return shlex.join(words)


def _warnings(plan: Plan, packed: bool) -> list[str]:
    """What will not go as asked for, and what to do; the worst first."""
    found = []
    memory = plan.memory
    if memory is None:
        found.append("nobody here knows the device's memory; say it with --memory")
    elif plan.is_too_large:
        found.append(
            f"{size_text(plan.total_where_kv_is)} are needed, and there are "
            f"{size_text(memory.bytes)}: the system may end the process; lower --slots, --context, "
            "--kv-tokens or --prefix-cache-mb, or take a smaller model"
        )
    if memory is not None and not packed and plan.first_load > memory.bytes:
        found.append(
            f"the first load packs the weights, which takes up to {size_text(plan.first_load)}; "
            "load the bundle once where there is more memory, on a processor of the same kind, "
            "and take the folder .packed along"
        )
    if plan.kv_tokens < plan.context:
        found.append(
            f"a request can have {plan.kv_tokens:,} tokens, not {plan.context:,}: "
            "KV of more does not fit"
        )
    elif plan.kv_tokens < plan.tokens_wanted:
        found.append(
            f"KV is held of {plan.kv_tokens:,} tokens, not of the {plan.tokens_wanted:,} that "
            f"{plan.slots} slots of {plan.context:,} can have: where requests are that long, some "
            "wait or are preempted"
        )
    return found
