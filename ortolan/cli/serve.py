"""`ortolan serve`: a bundle behind gRPC and HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from ortolan.cli.logs import logs_shown
from ortolan.cli.options import (
    bundle_argument,
    check_provider_options,
    copies_option,
    debug_option,
    option_name,
    provider_option,
    strict_option,
)
from ortolan.cli.output import write, write_table
from ortolan.errors import UsageError
from ortolan.runtime.serve.config import DEFAULTS, TYPES, Setting, Settings, gather, parsed

Function = TypeVar("Function", bound=Callable[..., Any])

# Every setting is an option; its default is the field's.
_HELP = {
    "host": ("ADDRESS", "Listen on this address of the machine."),
    "grpc_port": ("PORT", "For gRPC; 0 takes a free one, off does without."),
    "http_port": ("PORT", "For HTTP; the same."),
    "model_name": ("NAME", "What the model is called in requests.  [default: BUNDLE's name]"),
    "grace": ("S", "Seconds that running requests have after a first signal."),
    "port_file": ("FILE", "Write the addresses to this file, as JSON, when ready."),
    "tls_cert": ("FILE", "The certificate (chain), PEM: both servers speak TLS only."),
    "tls_key": ("FILE", "Its private key, PEM."),
    "tls_client_ca": ("FILE", "Clients must show a certificate of this authority, PEM."),
    "api_keys_file": ("FILE", "Every call needs a key of this file, which is TOML."),
    "open_paths": ("WORDS", "What needs no key, such as health,metrics; page is the chat page."),
    "log_format": ("FORMAT", "Of the log on standard error: text or json."),
    "log_level": ("LEVEL", "debug, info (a line per request), warning or error."),
    "heartbeat_timeout": ("S", "Seconds that a step may take before the server is not ready."),
    "chat_page": ("on|off", "A page to chat with, at / over HTTP."),
    "drain_delay": ("S", "Seconds after a first signal until new requests are refused."),
    "self_test": ("on|off", "Compare with the CPU's results before saying ready."),
    "replicas": ("N", "Engines that share the threads: for many requests on cores far apart."),
    "provider": ("NAME", "The execution provider to run on, such as cpu."),
    "threads": ("N", "Threads to compute with.  [default: the cores that may be used]"),
    "cache_dir": ("FOLDER", "Where packed weights are kept.  [default: in the bundle]"),
    "max_slots": ("N", "Answers that are made at once."),
    "max_context": ("N", "Most tokens of prompt and answer together.  [default: the bundle's]"),
    "prefill_chunk": ("N", "Most prompt tokens that one call reads."),
    "gap_steps": ("X", "How far a prompt may delay running answers, in plain steps."),
    "gap_ms": ("X", "The same in milliseconds.  [default: no such bound]"),
    "whole_prompt": ("N", "Prompts up to so many tokens are read at once, whatever the gap."),
    "kv_tokens": ("N", "Most tokens whose KV is held.  [default: by free memory]"),
    "prefix_cache_mb": ("N", "MiB for KV of earlier prompts.  [default: by free memory]"),
    "max_waiting": ("N", "Most answers that may wait."),
    "max_waiting_tokens": ("N", "Most prompt tokens that may wait."),
    "priority_patience": ("N", "How many may overtake a request that waits."),
    "accuracy": ("NAME", "default: int8 activations; exact: float32, slower."),
    "decode_graph": ("NAME", "Where a bundle's phases differ: its graph for few or many rows."),
    "provider_options": ("KEY=VALUE", "An option of the provider; can be given again."),
    "strict": ("", "Refuse a provider that leaves compute to the CPU."),
    "kv_copies": ("", "Take a provider that copies the KV cache at every step."),
}
# Options that every command has alike.
_SHARED = {
    "provider_options": provider_option,
    "strict": strict_option,
    "kv_copies": copies_option,
}


# An option that may stand without its value.
_ALONE_IT_IS_ON: dict[str, Any] = {"is_flag": False, "flag_value": "on"}


class _Value(click.ParamType[Any]):
    """A setting's value, of the type of its field."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return parsed(value, TYPES[self.name], option_name(self.name))


def _metavar(name: str, metavar: str) -> str:
    """With the words that the setting's type allows, as `[default|exact]` or `PORT|off`."""
    kinds = get_args(TYPES[name]) if get_origin(TYPES[name]) is not Literal else (TYPES[name],)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if kinds == (TYPES[name],):
        return f"[{'|'.join(words)}]"
    return "|".join([metavar, *words])


def _setting_options(command: Function) -> Function:
    for name, (metavar, text) in reversed(_HELP.items()):
        if name in _SHARED:
            command = _SHARED[name](command)
            continue
        shown = "" if DEFAULTS[name] is None else f"  [default: {DEFAULTS[name]}]"
        command = click.option(
            option_name(name),
            name,
            type=_Value(name),
            metavar=_metavar(name, metavar),
            help=text + shown,
            **(_ALONE_IT_IS_ON if name == "self_test" else {}),
        )(command)
    return command


@click.command(short_help="Serve a bundle over gRPC and HTTP.")
@bundle_argument
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Settings in TOML, under the options' names with _ for -.",
)
@_setting_options
@debug_option
def serve(bundle: Path, config_file: Path | None, **flags: Any) -> None:
    """Serve BUNDLE until SIGTERM or Ctrl-C; running requests then have --grace to end.

    A setting is taken from its option, else from a variable named like ORTOLAN_SERVE_MAX_SLOTS,
    else from --config FILE, else it is the default. Without --api-keys-file there is no
    authentication, without --tls-cert no encryption.
    """
    settings = gather(flags, os.environ, config_file)
    check_provider_options(settings.engine.provider, settings.engine.provider_options)
    _show(settings.listed, bundle)

    with logs_shown(settings.serve.log_format, settings.serve.log_level) as say:
        _serve(bundle, settings, say)


def _serve(bundle: Path, settings: Settings, say: Callable[[str], None]) -> None:
    from ortolan.optional import require

    for module in ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "prometheus_client"):
        require(module, "serve", "serving a model")
    from ortolan.runtime.bundle import Bundle
    from ortolan.runtime.serve import server
    from ortolan.runtime.serve.security import is_loopback, open_security

    server.check_ports(settings.serve)
    security = open_security(settings.serve)
    if security.keys is not None and security.tls is None and not is_loopback(settings.serve.host):
        say("keys and prompts cross the network unencrypted, unless a proxy in front adds TLS")
    _check_port_file(settings.serve.port_file)
    service = server.open_service(Bundle.open(bundle), settings)
    server.run(
        service,
        settings.serve,
        on_listening=lambda addresses: _say_listening(addresses, security.tls is not None),
        on_ready=lambda addresses: _say_ready(service, addresses, settings.serve.port_file),
        say=say,
    )


def _show(settings: tuple[Setting, ...], bundle: Path) -> None:
    from ortolan.runtime.machine import usable_cores

    # What settings without a value come to, as far as it is known before the model is loaded.
    meant = {
        "model_name": bundle.resolve().name,
        "threads": str(usable_cores()),
        "cache_dir": "in the bundle, or the user's cache folder",
        "max_context": "the bundle's",
        "gap_ms": "no bound",
        "kv_tokens": "what memory has room for",
        "prefix_cache_mb": "a sixth of the room for KV",
    }
    rows = [
        (one.name, meant.get(one.name, "none") if one.value is None else _text(one), one.origin)
        for one in settings
    ]
    write_table(("setting", "value", "from"), rows)


def _text(setting: Setting) -> str:
    """A setting's value as it would be written."""
    if isinstance(setting.value, dict):
        return "; ".join(f"{name}={value}" for name, value in setting.value.items()) or "none"
    return str(setting.value)


def _check_port_file(port_file: str | None) -> None:
    """Raises UsageError if the file's folder is missing, before a model is loaded for nothing."""
    if port_file is not None and not Path(port_file).absolute().parent.is_dir():
        raise UsageError(f"port_file {port_file}: its folder does not exist; make it first")


def _say_listening(addresses: Any, tls: bool) -> None:
    """One line per server: these are a promise, as scripts read them."""
    if addresses.grpc is not None:
        write(f"gRPC: {addresses.grpc}\n")
    if addresses.http is not None:
        write(f"HTTP: {'https' if tls else 'http'}://{addresses.http}\n")


def _say_ready(service: Any, addresses: Any, port_file: str | None) -> None:
    """What open settings came to, and the line that scripts wait for; then the port file."""
    from ortolan.runtime.serve.server import sizes

    found = ", ".join(f"{name} {value}" for name, value in sizes(service).items())
    write(f"in use: {found}\n{service.name} is ready\n")
    if port_file is not None:
        path = Path(port_file)
        text = json.dumps({"model": service.name, "grpc": addresses.grpc, "http": addresses.http})
        # Whoever waits for the file must not find half of it.
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            raise UsageError(
                f"port_file {port_file}: cannot be written ({error.strerror})"
            ) from error
