"""Options that several commands share; their defaults are those of the dataclasses' fields."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import click

from ortolan.errors import RequestError, UsageError
from ortolan.runtime.params import EngineConfig
from ortolan.runtime.providers.options import option_from_text

# More than machines have; ONNX Runtime would try to start any number.
MAX_THREADS = 1024

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Settings:
    """What holds for the whole run; click's context object."""

    debug: bool = False


def default_of(kind: type[Any], name: str) -> Any:
    """The default of a dataclass's field."""
    (found,) = (item for item in dataclasses.fields(kind) if item.name == name)
    if found.default_factory is not dataclasses.MISSING:
        return found.default_factory()
    return found.default


def option_name(field: str) -> str:
    """The option that sets a dataclass's field."""
    return "--provider-option" if field == "provider_options" else "--" + field.replace("_", "-")


def with_option_name(message: str, fields: Collection[str]) -> str:
    """The message, which may begin with the name of a field, with the option's name instead."""
    field, _, rest = message.partition(" ")
    return f"{option_name(field)} {rest}" if field in fields else message


def utf8(argument: str, name: str) -> str:
    """The argument's bytes read as UTF-8, whatever the locale made of them."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError as error:
        raise RequestError(f"{name} is not UTF-8; convert it to UTF-8") from error


def debug_option(command: Function) -> Function:
    """`--debug`: accepted before and after the command's name."""

    def switch_on(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Settings).debug = True

    return click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=switch_on,
        help="Show a traceback when something fails.",
    )(command)


def _as_options(ctx: click.Context, param: click.Parameter, given: Any) -> dict[str, str] | None:
    """The KEY=VALUE of all uses together; None where there is none."""
    name = "--provider-option"
    return dict(option_from_text(utf8(text, name), name) for text in given) or None


def check_provider_options(provider: str, options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that the provider does not take, before anything is loaded.

    A plug-in library is asked when it is registered.
    """
    from ortolan.runtime.providers import load_provider
    from ortolan.runtime.providers.plugin import is_library

    if options and not is_library(provider):
        load_provider(provider).with_options(options)


provider_option = click.option(
    "--provider-option",
    "provider_options",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_as_options,
    help="An option of the provider, such as device_id=1; can be given again.",
)
strict_option = click.option(
    "--strict/--no-strict",
    default=None,
    help="Refuse a provider that leaves compute to the CPU.  [default: say so in the log]",
)
copies_option = click.option(
    "--kv-copies/--no-kv-copies",
    default=None,
    help="Take a provider that copies the KV cache at every step.  [default: refuse]",
)

bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")

_ENGINE_OPTIONS = {
    "provider": click.option(
        "--provider",
        metavar="NAME",
        default=default_of(EngineConfig, "provider"),
        show_default=True,
        help="The execution provider to run on, or the path of a plug-in library.",
    ),
    "provider_options": provider_option,
    "strict": strict_option,
    "kv_copies": copies_option,
    "threads": click.option(
        "--threads",
        metavar="N",
        type=click.IntRange(1, MAX_THREADS),
        default=default_of(EngineConfig, "threads"),
        help="Threads to compute with.  [default: the cores that this process may use]",
    ),
    "cache_dir": click.option(
        "--cache-dir",
        metavar="FOLDER",
        default=default_of(EngineConfig, "cache_dir"),
        help="Where packed weights are kept.  [default: in the bundle, if it can be written]",
    ),
    "max_context": click.option(
        "--max-context",
        metavar="N",
        type=click.IntRange(min=2),
        default=default_of(EngineConfig, "max_context"),
        help="Most tokens of prompt and answer together.  [default: the bundle's]",
    ),
    "max_slots": click.option(
        "--max-slots",
        metavar="N",
        type=click.IntRange(min=1),
        default=default_of(EngineConfig, "max_slots"),
        show_default=True,
        help="Answers that are generated at once.",
    ),
    "kv_tokens": click.option(
        "--kv-tokens",
        metavar="N",
        type=click.IntRange(min=2),
        default=default_of(EngineConfig, "kv_tokens"),
        help="Most tokens that they may hold together.  [default: what memory has room for]",
    ),
    "prefix_cache_mb": click.option(
        "--prefix-cache-mb",
        metavar="MB",
        type=click.IntRange(min=0),
        default=default_of(EngineConfig, "prefix_cache_mb"),
        help="MiB for the beginnings of earlier prompts; 0: none.  [default: a sixth of the room "
        "for KV]",
    ),
    "prefill_chunk": click.option(
        "--prefill-chunk",
        metavar="N",
        type=click.IntRange(min=2),
        default=default_of(EngineConfig, "prefill_chunk"),
        show_default=True,
        help="Most tokens of prompts that are read at a time.",
    ),
    "gap_steps": click.option(
        "--gap-steps",
        metavar="X",
        type=float,
        default=default_of(EngineConfig, "gap_steps"),
        show_default=True,
        help="While a prompt is read, other answers get a token every so many plain steps.",
    ),
    "gap_ms": click.option(
        "--gap-ms",
        metavar="MS",
        type=float,
        default=default_of(EngineConfig, "gap_ms"),
        help="The same in milliseconds, if that is less.  [default: no bound of the kind]",
    ),
    "whole_prompt": click.option(
        "--whole-prompt",
        metavar="N",
        type=click.IntRange(min=0),
        default=default_of(EngineConfig, "whole_prompt"),
        show_default=True,
        help="Prompts up to so many tokens are read at once, whatever gap that makes.",
    ),
    "accuracy": click.option(
        "--accuracy",
        type=click.Choice(get_args(get_type_hints(EngineConfig)["accuracy"])),
        default=default_of(EngineConfig, "accuracy"),
        show_default=True,
        help="default: quantized products with int8 activations; exact: in float32, slower.",
    ),
    "decode_graph": click.option(
        "--decode-graph",
        type=click.Choice(get_args(get_type_hints(EngineConfig)["decode_graph"])),
        default=default_of(EngineConfig, "decode_graph"),
        show_default=True,
        help="Where phases differ: weights for few answers (decode) or many (decode_many) at once.",
    ),
}


# Those that say what to run on; see docs/providers.md.
PROVIDER = ("provider", "provider_options", "strict", "kv_copies")

# Those that say how requests share a model; see docs/engine.md.
SHARING = (
    "max_slots",
    "kv_tokens",
    "prefix_cache_mb",
    "prefill_chunk",
    "gap_steps",
    "gap_ms",
    "whole_prompt",
    "decode_graph",
)


def engine_options(*names: str) -> Callable[[Function], Function]:
    """The named fields of EngineConfig as options; the command receives them as `engine`."""

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def gathered(**values: Any) -> Any:
            engine = {name: values.pop(name) for name in names}
            for name in ("provider_options", "strict", "kv_copies"):
                if name in engine and engine[name] is None:
                    engine[name] = default_of(EngineConfig, name)
            try:
                config = EngineConfig(**engine)  # now, before anything is read or loaded
                check_provider_options(config.provider, config.provider_options)
                return command(engine=engine, **values)
            except UsageError as error:
                raise UsageError(with_option_name(str(error), names)) from error

        for name in reversed(names):
            _ENGINE_OPTIONS[name](gathered)
        return gathered  # type: ignore[return-value]  # click calls by keyword

    return decorate
